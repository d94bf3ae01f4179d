"""The HTTP API: requests in, the client's and the store's verbs, answers out."""
