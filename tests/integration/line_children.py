"""Child processes driven line by line through their pipes, and ended by the test."""

import subprocess
import sys
from dataclasses import dataclass, field


@dataclass
class LineChild:
    process: subprocess.Popen[str]

    def says(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class LineChildren:
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Python with these arguments."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def stop(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
