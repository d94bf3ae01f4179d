"""The times that the machine draws from: the edges of buckets, leases and memories, and what lies around them."""

from tests.store.builders import BUCKET_MS

# Five seconds before epoch milliseconds get a thirteenth digit, so that a comparison of times as texts goes wrong.
START_MS = 10**12 - 5_000
LEASE_MS = 30_000
ID_MEMORY_MS = 60_000

DELAYS_MS = [-3 * BUCKET_MS, -BUCKET_MS, -1, 0, 1, 500, LEASE_MS, 2 * BUCKET_MS]
AROUND_MS = [-1, 0, 1]
DUES = [*(("now", ms) for ms in DELAYS_MS), *(("border", ms) for ms in AROUND_MS), ("epoch", 0)]
STEPS_MS = [1, 500, LEASE_MS, ID_MEMORY_MS, BUCKET_MS, 3 * BUCKET_MS, -1, -LEASE_MS]
