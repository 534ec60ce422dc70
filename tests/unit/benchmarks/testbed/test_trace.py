import gzip
from pathlib import Path

import pytest

from benchmarks.testbed import trace as trace_module
from benchmarks.testbed.trace import read_trace
from harvester.contracts.errors import ConfigError

HEADER = "t_s,input_tokens,output_tokens\n"


def written(tmp_path: Path, text: str | bytes, name: str = "load.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_reads_plain_and_gzipped_files_alike(tmp_path: Path) -> None:
    text = HEADER + "10.5,7,3\n12,8,0\n"
    plain = read_trace(written(tmp_path, text))
    zipped = read_trace(written(tmp_path, gzip.compress(text.encode()), "load.csv.gz"))
    for trace in (plain, zipped):
        assert trace.t_s.tolist() == [0.0, 1.5]
        assert trace.input_tokens.tolist() == [7, 8]
        assert trace.output_tokens.tolist() == [3, 0]
        assert trace.rate == pytest.approx(2 / 1.5)


def test_takes_columns_in_any_order_beside_others(tmp_path: Path) -> None:
    text = '\ufeff"output_tokens",model,t_s,input_tokens\r\n3,x,0,7.0\r\n\r\n4,y,1,8\r\n'
    trace = read_trace(written(tmp_path, text))
    assert trace.input_tokens.tolist() == [7, 8]
    assert trace.output_tokens.tolist() == [3, 4]


def test_takes_azure_files_as_they_are_published(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-17 00:00:00,879,55\n"
    )
    trace = read_trace(written(tmp_path, text))
    assert trace.t_s.tolist() == pytest.approx([0.0, 4.314579, 20653.31941], abs=1e-5)
    assert trace.input_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("", 1, "column t_s is missing"),
        ("t_s,input_tokens\n1,2\n", 1, "column output_tokens is missing"),
        ("t_s,t_s,input_tokens,output_tokens\n", 1, "appears twice"),
        (HEADER + "0,1,1\nnan,1,1\n", 3, "t_s is 'nan'"),
        (HEADER + "0,1,1\n1,inf,1\n", 3, "input_tokens is 'inf'"),
        (HEADER + "0,1,1\n1,-4,1\n", 3, "input_tokens is '-4'"),
        (HEADER + "0,1,1\n1,4,1.5\n", 3, "not a whole number"),
        (HEADER + "0,1,1\n1,4\n", 3, "2 columns"),
        (HEADER + "0,1,1\n1,4,many\n", 3, "'many', not a number"),
        (HEADER + "0,1,1\n1,4,1_0\n", 3, "'1_0', not a number"),
        (HEADER + "0,1,1\n1,99999999,1\n", 3, "between 0 and"),
        (HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", 3, "goes back"),
        (HEADER + "5,1,1\n\n4,1,1\n", 4, "goes back from 5 to 4"),
        (HEADER + "0,1,1\n" + "7" * 5000 + "\n", 3, "longer than"),
        (HEADER.encode() + b"0,1,1\n\xff\xfe,1,1\n", 3, "not UTF-8"),
        (HEADER + '0,1,1\n"1,1,1\n', 3, "not CSV"),
    ],
)
def test_names_file_and_line_of_what_is_malformed(
    tmp_path: Path, text: str | bytes, line: int, fault: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert f"{path}, line {line}: " in str(raised.value)
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    ("text", "fault"), [(HEADER, "no request"), (HEADER + "3,1,1\n3,1,1\n", "same t_s")]
)
def test_refuses_a_trace_without_length(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        read_trace(written(tmp_path, text))


def test_refuses_what_is_no_file_and_what_is_half_a_gzip_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        read_trace(tmp_path)
    whole = gzip.compress((HEADER + "1,1,1\n" * 300).encode())
    with pytest.raises(ConfigError, match="not a whole gzip file"):
        read_trace(written(tmp_path, whole[:-12], "half.csv.gz"))
    with pytest.raises(ConfigError, match="not a whole gzip file"):
        read_trace(written(tmp_path, HEADER, "plain.csv.gz"))


def test_stops_at_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEADER + "0,1,1\n" * 50)
    monkeypatch.setattr(trace_module, "ROWS_MAX", 10)
    with pytest.raises(ConfigError, match=r"line 12: more than 10 requests"):
        read_trace(path)
    monkeypatch.setattr(trace_module, "BYTES_MAX", 60)
    with pytest.raises(ConfigError, match="cut it"):
        read_trace(path)
