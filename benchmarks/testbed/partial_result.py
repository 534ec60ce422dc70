"""A run's results so far, in a file that is whole at every moment.

A run that is ended by force, or fails, loses only its present part.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harvester.contracts.errors import ConfigError
from harvester.platform.whole_file import write_whole


@dataclass(slots=True)
class PartialResult:
    path: Path
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, found: Mapping[str, Any]) -> None:
        """Add these to the file, over what it has under the same names.

        A file that cannot be written is noted on stderr: the run may still end well.
        """
        self.found |= found
        try:
            write_whole(self.path, json.dumps(self.found, indent=1) + "\n")
        except ConfigError as error:
            print(f"note: {error}", file=sys.stderr, flush=True)
