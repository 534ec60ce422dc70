"""Names of a soak's parts, as records, commands and judges use them."""

PRODUCTION, GUEST, DEDICATED, AGENT, GATEWAY = (
    *("production", "guest", "dedicated", "agent", "gateway"),
)
SLOT, JOB = "slot0", "job-a"
