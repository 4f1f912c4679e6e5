"""The gateway's figures for Prometheus."""

from prometheus_client import Counter, Gauge, Histogram

CALLS = Counter("archon_gateway_calls", "Chat calls by outcome.", ["policy", "outcome"])
TOKENS = Counter("archon_gateway_tokens", "Tokens of captured calls.", ["policy", "kind"])
GAPS = Counter("archon_gateway_evidence_gaps", "Calls whose evidence has a gap.", ["policy"])
REWARDS = Counter("archon_gateway_rewards", "Rewards by outcome.", ["outcome"])
INFLIGHT = Gauge("archon_gateway_inflight_calls", "Chat calls that are running.")
REPLICAS = Gauge("archon_gateway_replicas", "Replicas that calls can go to.")
SECONDS = Histogram(
    "archon_gateway_call_seconds",
    "From the request to the end of its answer.",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
)
COMMIT_SECONDS = Histogram(
    "archon_gateway_commit_seconds",
    "Storing a call, to its COMMIT.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
