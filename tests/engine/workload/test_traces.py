"""Published traces as their authors write them, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.engine.workload_items import Item
from firsttoken.simulation.workload.traces import load_trace
from firsttoken.study.errors import CorpusError

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
1106,ChatGPT,0,0,0,Conversation log
1107,GPT-4,417,0,417,API log
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,17,2.5,ChatGPT,472,18,490,Conversation log
6.0,,1.0,GPT-4,3,2,5,API log
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""
BAILIAN = """{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 9, \
"type": "text", "turn": 1, "hash_ids": [1, 2]}
{"chat_id": 9, "parent_chat_id": 7, "timestamp": 81.5, "input_length": 60, "output_length": 8, \
"type": "search", "turn": 2, "hash_ids": [1]}
"""
UNNAMED = """{"timestamp": 20, "input_length": 40, "output_length": 9}
{"timestamp": 60, "input_length": 60, "output_length": 8}
"""


@pytest.fixture
def write(tmp_path):
    """Writes a trace file and gives its path."""

    def write(text, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_list_is_read_as_its_lines_are(write, indent) -> None:
    """On one line, which may have more than a megabyte, or on many."""
    requests = [json.loads(line) for line in MOONCAKE.splitlines()]
    requests[1]["hash_ids"] = list(range(300_000))
    listed = load_trace(write(json.dumps(requests, indent=indent), "listed.json"))
    assert listed.items == load_trace(write(MOONCAKE, "lines.jsonl")).items
    with pytest.raises(CorpusError, match="entry 2: input_length is 'many', no number"):
        load_trace(write(json.dumps([requests[0], requests[1] | {"input_length": "many"}])))
    with pytest.raises(CorpusError, match="it is an empty list"):
        load_trace(write("[]"))


def test_utf_16_is_named(write) -> None:
    with pytest.raises(CorpusError, match=r"it is UTF-16 text; save it as UTF-8 \(`iconv"):
        load_trace(write(AZURE_2023.encode("utf-16")))


@pytest.mark.parametrize(
    ("text", "name", "items", "dropped"),
    [
        (
            AZURE_2023,
            "Azure LLM inference",
            (Item(0, 4808, 10), Item(0.052, 3180, 8), Item(59.02004, 110, 27)),
            0,
        ),
        (AZURE_2024, "Azure LLM inference", (Item(0, 2162, 5), Item(0.007405, 2399, 6)), 0),
        (BURSTGPT, "BurstGPT", (Item(0, 472, 18), Item(40, 1087, 230)), 2),
        (VIDUR, "vidur or Sarathi-Serve", (Item(0, 374, 44), Item(4.314579, 396, 109)), 0),
        (BURSTGPT_2, "BurstGPT", (Item(0, 472, 18), Item(0.5, 3, 2)), 0),
        (MOONCAKE, "Mooncake", (Item(0, 6955, 52), Item(3.053, 6472, 26)), 0),
        (BAILIAN, "Alibaba Bailian", (Item(0, 40, 9), Item(20.386, 60, 8)), 0),
    ],
    ids=["azure-2023", "azure-2024", "burstgpt", "vidur", "burstgpt-2", "mooncake", "bailian"],
)
def test_each_published_format(write, text, name, items, dropped):
    path = write(text)
    trace = load_trace(path)
    assert (trace.format, trace.items, trace.dropped) == (name, items, dropped)
    assert load_trace(str(path)).items == items
    for other in (text.replace("\n", "\r\n"), "\ufeff" + text, text.rstrip("\n"), text.replace("\n", "\n\n")):
        assert load_trace(write(other)).items == items, "line ends, byte order marks and empty lines change nothing"


def test_prompts_begin_alike_as_far_as_their_hashes_do(write):
    trace = load_trace(write(MOONCAKE))
    first, second = trace.prompt(0), trace.prompt(1)
    assert (len(first), len(second)) == (6955, 6472)
    assert first[:1024] == second[:1024] == (46,) * 512 + (47,) * 512 and first[1024] != second[1024]
    assert first[3 * 512] != second[3 * 512], "what no hash covers is each prompt's own"
    assert trace.up_to(6500).hashes == trace.hashes[1:] and load_trace(write(VIDUR)).prompt(0) == (0,) * 374
    with pytest.raises(CorpusError, match=r"line 1: hash_ids is \['a'\], no list of whole numbers"):
        load_trace(write(lines(1000, hash_ids=["a"])))


def lines(time, count=4, **fields) -> str:
    """JSON lines of requests that come ``time`` apart."""
    rows = [{"timestamp": time * n, "input_length": 50 + n, "output_length": 5} | fields for n in range(count)]
    return "\n".join(map(json.dumps, rows))


CHAT = {"chat_id": 3, "parent_chat_id": -1, "turn": 1, "type": "text", "hash_ids": [1]}


@pytest.mark.parametrize("time", [20.0, 20, "20.0", "20"])
@pytest.mark.parametrize("start", [0, 5000.25])
def test_bailians_times_are_seconds_however_they_are_written(write, time, start):
    rows = [json.loads(line) for line in lines(1, **CHAT).splitlines()]
    for number, row in enumerate(rows):
        row["timestamp"] = type(time)(number * float(time) + start if start else float(time) * number)
        if isinstance(time, int):
            row["timestamp"] = number * time + int(start)
    shuffled = [rows[place] for place in (2, 0, 3, 1)]
    trace = load_trace(write("\n".join(map(json.dumps, shuffled))))
    assert (trace.format, trace.unit, trace.span_s) == ("Alibaba Bailian", "s", 60.0)
    assert [item.prompt_tokens for item in trace.items] == [50, 51, 52, 53]
    assert trace.description().startswith(
        "a trace of Alibaba Bailian, times in s: 4 requests over 60 s; prompts that b"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (UNNAMED, r"no unit, as it is of no published format \(Alibaba Bailian has chat_id.*Mooncake has hash_ids\)"),
        (lines(20.5, hash_ids=[1]), "read as Mooncake, whose times are in ms, it has a time of 20.5"),
        (lines(20, hash_ids=[1]), "its 4 requests would come within 0.06 s"),
        (lines("0.5", 1, hash_ids=[1]).replace('""', '"0.5"'), "it has a time of 0.5"),
        (lines(86_400_000, 9, hash_ids=[1]), "it would be 8 days long"),
        (lines(86_400_000, 9, **CHAT), "read as Alibaba Bailian, whose times are in s, it would be 8,000 days long"),
        (BURSTGPT.replace("1106", "10452000000").replace("1107,GPT-4,417,0", "10452000001,GPT-4,417,1"), "days long"),
    ],
)
def test_times_whose_unit_is_in_doubt_are_asked_for(write, text, words):
    path = write(text)
    with pytest.raises(CorpusError, match=words + r".*are they seconds or milliseconds\? say unit s or ms") as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)
    spans = {unit: load_trace(path, unit=unit).span_s for unit in ("s", "ms")}
    assert spans["s"] == pytest.approx(1000 * spans["ms"])


def test_a_clock_has_no_unit(write):
    with pytest.raises(CorpusError, match="clock times"):
        load_trace(write(AZURE_2023), unit="s")
    with pytest.raises(CorpusError, match="times are in s or ms, not in 'h'"):
        load_trace(write(MOONCAKE), unit="h")


def test_a_torn_line_is_named(write):
    with pytest.raises(CorpusError, match="line 6"):
        load_trace(write(BURSTGPT + "this is torn"))


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=20))
def test_items_are_sorted_from_zero_and_none_is_lost(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("trace") / "mooncake.jsonl"
    names = ("timestamp", "input_length", "output_length")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    served = sorted((row for row in rows if row[1] and row[2]), key=lambda row: row[0])
    if not served:
        with pytest.raises(CorpusError, match=rf"no request with a prompt and an answer \({len(rows)} without\)"):
            load_trace(path, unit="ms")
        return
    trace = load_trace(path, unit="ms")
    assert trace.dropped == len(rows) - len(served)
    assert [(item.prompt_tokens, item.output_tokens) for item in trace.items] == [row[1:] for row in served]
    assert [item.arrival_s for item in trace.items] == pytest.approx([(row[0] - served[0][0]) / 1e3 for row in served])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"it is empty; mend"),
        ("\n \n", r"it is empty; mend"),
        ("a,b,c\n1,2,3\n", r"line 1: no trace format has the header 'a,b,c'; known are .*Azure.*BurstGPT.*Mooncake"),
        (AZURE_2023.replace("ContextTokens", "Tokens"), r"line 1: the header lacks ContextTokens, which .*Azure"),
        (BURSTGPT.replace("Re", "re"), r"line 1: the header lacks Request tokens, Response tokens, which .*BurstGPT"),
        (MOONCAKE.replace("input_length", "length"), r"line 1: it lacks input_length, which a line of Mooncake has"),
        (BAILIAN.replace('"turn": 2, ', ""), r"line 2: it lacks turn, which a line of Alibaba Bailian has"),
        (MOONCAKE + BAILIAN, r"line 3: it is a line of Alibaba Bailian, and those before are of Mooncake"),
        (BAILIAN + MOONCAKE, r"line 3: it lacks chat_id, parent_chat_id, turn"),
        (MOONCAKE + UNNAMED, r"line 3: it lacks hash_ids, which a line of Mooncake has"),
        (MOONCAKE + "[1, 2]\n", r"line 3: it lacks timestamp, input_length, output_length"),
        (MOONCAKE[:-40], r"line 2: it is no complete JSON; mend"),
        (AZURE_2023 + "2023-11-16 18:1", r"line 5: it has 1 fields and the header 3; mend"),
        (BURSTGPT + "9,GPT-4,1,2,3,API log,x\n", r"line 6: it has 7 fields and the header 6"),
        (BURSTGPT + '9,"GPT' + "x" * 140_000, r"line 6: it is no CSV"),
        (BURSTGPT.replace("1087", "many"), r"line 3: Request tokens is 'many', no number; mend"),
        (BURSTGPT.replace("1087", "nan"), r"line 3: Request tokens is 'nan', no number"),
        (BURSTGPT.replace("1087", ""), r"line 3: Request tokens is '', no number"),
        (BURSTGPT.replace("45,", "inf,"), r"line 3: Timestamp is 'inf', no number"),
        (MOONCAKE.replace("6472", "null"), r"line 2: input_length is None, no number"),
        (MOONCAKE.replace("6472", "true"), r"line 2: input_length is True, no number"),
        (MOONCAKE.replace("6472", "1" + "0" * 400), r"line 2: it is no complete JSON"),
        (AZURE_2023.replace("2023-11-16 18:18:03", "yesterday"), r"line 4: TIMESTAMP is 'yesterday', no time; mend"),
        (BURSTGPT.replace("1087", "-7"), r"line 3: Request tokens is -7, it must be a whole number from 0 on; mend"),
        (MOONCAKE.replace("52", "5.5"), r"line 1: output_length is 5.5, it must be a whole number"),
        (BURSTGPT.encode() + b"9,\xff\xfe,1,2,3,API log\n", r"line 6: this is no UTF-8 text"),
        (gzip.compress(AZURE_2023.encode()), r"line 1: this is no UTF-8 text; is the file compressed"),
    ],
)
def test_a_bad_file_is_one_clear_line(write, text, words):
    path = write(text)
    with pytest.raises(CorpusError, match=words) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CorpusError, match=r"none.csv cannot be read: No such file or directory; "):
        load_trace(tmp_path / "none.csv")
    with pytest.raises(CorpusError, match="Is a directory"):
        load_trace(tmp_path)
