"""How a version's sources are compared with the upstream table."""

import pytest

from tests.compat.conformance import TableVerdict, compare, holds
from tests.compat.source_tree import SourceTree
from tests.compat.symbol import Symbol, Use
from tests.compat.upstream_versions import UPSTREAM_VERSIONS


class WrittenTree(SourceTree):
    """Sources given by the test."""

    def __init__(self, **modules: str) -> None:
        super().__init__("0.32.0")
        self._files = {f"{name.replace('.', '/')}.py": text for name, text in modules.items()}

    def _text(self, path: str) -> bytes | None:
        text = self._files.get(path)
        return None if text is None else text.encode()


ENGINE = """
class Base:
    def __init__(self):
        self.queue, self.done = [], False

    def step(self, limit: int, *, strict: bool = False): ...

class Engine(Base):
    STATE = 1

    @router.post("/pause")
    async def pause(self, mode="abort"): ...
"""


def one(use: Use, name: str, *details: str) -> bool:
    return holds(Symbol(use, "engine", name, details), WrittenTree(engine=ENGINE))


def test_finds_members_methods_and_what_is_set_on_self_also_in_a_base_class() -> None:
    assert one(Use.READ, "Engine.STATE")
    assert one(Use.READ, "Engine.done")
    assert one(Use.READ, "Engine.step")
    assert not one(Use.READ, "Engine.gone")
    assert not one(Use.READ, "Gone.step")


def test_follows_a_base_class_into_the_module_that_it_is_imported_from() -> None:
    tree = WrittenTree(engine=ENGINE, child="from engine import Engine\nclass Child(Engine): ...")
    assert holds(Symbol(Use.OVERRIDE, "child", "Child.step", ("limit", "strict")), tree)
    assert holds(Symbol(Use.READ, "child", "Engine"), tree)


def test_an_override_must_have_exactly_the_upstream_parameters() -> None:
    assert one(Use.OVERRIDE, "Engine.step", "limit", "strict")
    assert not one(Use.OVERRIDE, "Engine.step", "limit")
    assert not one(Use.OVERRIDE, "Engine.step", "limit", "strict", "more")


def test_a_call_may_leave_out_only_what_has_a_default() -> None:
    assert one(Use.CALL, "Engine.step", "limit")
    assert one(Use.CALL, "Engine.pause")
    assert not one(Use.CALL, "Engine.step", "strict")
    assert not one(Use.CALL, "Engine.step", "limit", "gone")


def test_a_definition_is_relied_on_to_ask() -> None:
    assert one(Use.ASK, "Engine.__init__", "queue", "done")
    assert not one(Use.ASK, "Engine.__init__", "queue", "gone")
    assert not one(Use.ASK, "Engine.gone")


def test_a_subclass_relies_on_the_bases() -> None:
    assert one(Use.SUBCLASS, "Engine", "Base")
    assert not one(Use.SUBCLASS, "Engine", "Other")


def test_a_route_is_a_path_and_a_method() -> None:
    assert one(Use.ROUTE, "/pause", "post")
    assert not one(Use.ROUTE, "/pause", "get")


def test_a_read_can_rely_on_a_string_in_the_definition() -> None:
    assert one(Use.READ, "Engine.pause", "abort")
    assert not one(Use.READ, "Engine.pause", "keep")


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0"])
def test_sources_without_anything_break_what_is_relied_on_and_nothing_else(version: str) -> None:
    table = UPSTREAM_VERSIONS[version]
    findings = compare(WrittenTree(), table)
    assert {f.verdict for f in findings} == {TableVerdict.BROKEN, TableVerdict.ABSENT}
    assert all((f.verdict is TableVerdict.BROKEN) == f.symbol.when(table) for f in findings)
    assert all(f.found == "no such module" for f in findings)


def test_a_hook_that_the_capability_table_denies_is_reported() -> None:
    checker = WrittenTree(
        **{
            "vllm.entrypoints.rl.online.api_router": (
                '@router.post("/weight_checker")\ndef check(): ...'
            )
        }
    )
    findings = compare(checker, UPSTREAM_VERSIONS["0.31.0"])
    undeclared = [f.symbol.name for f in findings if f.verdict is TableVerdict.UNDECLARED]
    assert undeclared == ["/weight_checker"]
