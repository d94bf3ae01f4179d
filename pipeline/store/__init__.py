"""All Redis state: every key and every script has its one owner here."""
