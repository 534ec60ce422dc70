"""The page directory: what agent, production engines and guest of one slot tell each other."""

from harvester.contracts.page.directory import PageDirectory, PageName, engine_of, pulse_page
from harvester.contracts.page.kept import KeptPage
from harvester.contracts.page.owners import OWN_USER, PageOwners
from harvester.contracts.page.reader import PageReader, Reading
from harvester.contracts.page.records import (
    MOST_GPUS,
    MOST_SHAPE_CHARACTERS,
    Calibration,
    EngineCore,
    Grant,
    GrantMode,
    Guest,
    GuestMemory,
    Law,
    Lending,
    ProductionModel,
    Pulse,
    PulseHead,
    is_gpu_uuid,
    latest_cores,
    stated_gpus,
)
from harvester.contracts.page.seal import PAGE_BYTES, PageFault
from harvester.contracts.page.writer import PageWriter
from harvester.contracts.page.writer_lock import PageHeld

__all__ = [
    "MOST_GPUS",
    "MOST_SHAPE_CHARACTERS",
    "OWN_USER",
    "PAGE_BYTES",
    "Calibration",
    "EngineCore",
    "Grant",
    "GrantMode",
    "Guest",
    "GuestMemory",
    "KeptPage",
    "Law",
    "Lending",
    "PageDirectory",
    "PageFault",
    "PageHeld",
    "PageName",
    "PageOwners",
    "PageReader",
    "PageWriter",
    "ProductionModel",
    "Pulse",
    "PulseHead",
    "Reading",
    "engine_of",
    "is_gpu_uuid",
    "latest_cores",
    "pulse_page",
    "stated_gpus",
]
