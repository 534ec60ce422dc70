"""The weight server's OpenAPI document, a relay's too: every route, with what it answers."""

from harvester.platform.openapi_document import JSON, PATH, TEXT, Operation, document
from weightsync.layout.names import LATEST_FILE
from weightsync.transport.wire import StoreList, StoreVersions

DOCUMENT = document(
    "weight server",
    {
        "GET /stores": Operation("The caller's stores", None, StoreList, refuses=(409, 503)),
        "GET /stores/{store}": Operation("Versions", None, StoreVersions, refuses=(404, 409, 503)),
        f"GET /stores/{{store}}/{LATEST_FILE}": Operation(
            "The newest version; Prefer: wait=SECONDS waits for another one",
            answers=str,
            kinds=(TEXT,),
            headers=("If-None-Match", "Prefer"),
            refuses=(304, 404, 409, 503),
        ),
        "GET /stores/{store}/{directory}/{file}": Operation(
            "A file or a range of it; an index whole, with an entity tag",
            kinds=("application/octet-stream", JSON),
            headers=("If-None-Match", "Range"),
            refuses=(206, 304, 404, 409, 416, 503),
        ),
        "GET /healthz": Operation("Transfers under way", None, str, (TEXT,)),
        "GET /metrics": Operation("Prometheus text", None, str, (TEXT,)),
        f"GET {PATH}": Operation("This document"),
    },
    refuses=lambda name: () if name == "GET /healthz" else (401, 403),
    retried=(503,),
)
