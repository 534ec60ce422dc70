"""Names of prompts, by which deaths of engines are charged to requests of the same content."""

from harvester.contracts.ids import JobId


class PromptNames:
    """Names of a job's prompts. The newest one is kept: all samples of a prompt share it, and each
    would hash a million ids again."""

    def __init__(self) -> None:
        self._newest: tuple[tuple[int, ...], str] = (), ""

    def of(self, job: JobId, token_ids: tuple[int, ...]) -> str:
        prompt, mark = self._newest
        if prompt is not token_ids or not mark:
            mark = f"{job}:{len(token_ids)}:{hash(token_ids)}"
            self._newest = token_ids, mark
        return mark

    def forget(self) -> None:
        self._newest = (), ""
