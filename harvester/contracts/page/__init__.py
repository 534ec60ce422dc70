"""The page directory: what agent, production engines and guest of one slot tell each other."""

from harvester.contracts.page.cores import latest_cores
from harvester.contracts.page.directory import PageDirectory, PageName, engine_of, pulse_page
from harvester.contracts.page.file import PageReader, PageWriter, Reading
from harvester.contracts.page.records import (
    MOST_SHAPE_CHARACTERS,
    Calibration,
    EngineCore,
    Grant,
    GrantMode,
    Guest,
    GuestMemory,
    Law,
    ProductionModel,
    Pulse,
    PulseHead,
    Record,
)
from harvester.contracts.page.seal import LAYOUT_VERSION, PAGE_BYTES, PageFault

__all__ = [
    "LAYOUT_VERSION",
    "MOST_SHAPE_CHARACTERS",
    "PAGE_BYTES",
    "Calibration",
    "EngineCore",
    "Grant",
    "GrantMode",
    "Guest",
    "GuestMemory",
    "Law",
    "PageDirectory",
    "PageFault",
    "PageName",
    "PageReader",
    "PageWriter",
    "ProductionModel",
    "Pulse",
    "PulseHead",
    "Reading",
    "Record",
    "engine_of",
    "latest_cores",
    "pulse_page",
]
