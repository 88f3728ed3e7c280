"""Other people's clients before a service of ours: OpenAI's own, and two that measure.

They run in an environment of their own (`tests/run.sh --clients`); the service beside them is this clone's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from started import KEY, TIMEOUT_S, served, written

openai = pytest.importorskip("openai", reason="not in .venv-clients: run tests/run.sh --clients")

GREEDY = {"model": "tiny", "temperature": 0}
CHAT = [{"role": "user", "content": "the hen"}]


class Service(NamedTuple):
    """A service of a tiny random model, and the folder of that."""

    url: str
    folder: Path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = written("write_tiny", tmp_path_factory.mktemp("clients") / "tiny")
    with served(folder, FIRSTTOKEN_API_KEY=KEY) as url:
        yield Service(url, folder)


def run(command: list[str], **environment: str) -> str:
    """What a client says that ends without an error."""
    tool = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    ended = subprocess.run(
        tool,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


class TestOpenAI:
    @pytest.fixture
    def client(self, service: Service) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0) as client:
            yield client

    def test_streams_are_the_whole_answers(self, client: openai.OpenAI) -> None:
        for asked in ({"prompt": "the inn"}, {"prompt": ["a", "the"], "n": 2}, {"prompt": "the inn", "stop": "e"}):
            whole = client.completions.create(**GREEDY, **asked, max_tokens=24)
            found = {choice.index: "" for choice in whole.choices}
            for chunk in client.completions.create(**GREEDY, **asked, max_tokens=24, stream=True):
                for choice in chunk.choices:
                    found[choice.index] += choice.text
            assert found == {choice.index: choice.text for choice in whole.choices}

    def test_chats_too(self, client: openai.OpenAI) -> None:
        asked = GREEDY | {"messages": CHAT, "max_completion_tokens": 24, "n": 2, "seed": 5, "temperature": 1.2}
        asked |= {"extra_body": {"ignore_eos": True}}  # else the processor's rounding decides whether one ends earlier
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        found, usage = {choice.index: "" for choice in whole.choices}, None
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
        assert found == {choice.index: choice.message.content for choice in whole.choices}
        assert usage == whole.usage and usage.completion_tokens == 48
        assert all(len(choice.logprobs.content) == 24 for choice in whole.choices)

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_conversation_goes_on_with_the_answer_however_it_is_handed_back(
        self, client: openai.OpenAI, whole: bool
    ) -> None:
        asked = GREEDY | {"max_completion_tokens": 5}
        if whole:
            message = client.chat.completions.create(**asked, messages=CHAT, logprobs=True).choices[0].message
        else:
            told: dict[str, str] = {}
            for chunk in client.chat.completions.create(**asked, messages=CHAT, stream=True):
                for key, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
                    told[key] = told.get(key, "") + value
            message = openai.types.chat.ChatCompletionMessage.model_validate(told)
        plain = {"role": "assistant", "content": message.content}
        left_out = [{"exclude_none": True}, {"exclude_unset": True}, {"exclude_defaults": True}, {}]
        dumps = [message.model_dump(**told) for told in left_out]
        dumps += [message.to_dict(), message.to_dict(exclude_unset=False), json.loads(message.to_json())]
        said = {
            client.chat.completions.create(**asked, messages=[*CHAT, history, *CHAT]).choices[0].message.content
            for history in (message, plain, *dumps)
        }
        assert len(said) == 1

    def test_a_prompt_that_is_too_long_is_known_as_such(self, client: openai.OpenAI) -> None:
        room = client.models.retrieve("tiny").max_model_len
        with pytest.raises(openai.BadRequestError, match=str(room)) as raised:
            client.completions.create(**GREEDY, prompt="a", max_tokens=room)
        assert raised.value.code == "context_length_exceeded" and raised.value.request_id

    def test_its_errors_are_what_they_should_be(self, service: Service, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="max_tokens") as raised:
            client.completions.create(**GREEDY, prompt="a", max_tokens=-1)
        assert (raised.value.param, raised.value.code) == ("max_tokens", "bad_request")
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            openai.OpenAI(base_url=f"{service.url}/v1", api_key="another").models.list()
        assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(service: Service, tmp_path: Path, kind: str) -> None:
    where = ["--url", service.url, "--api-key", KEY, "-m", "tiny", "--tokenizer", str(service.folder)]
    load = ["--concurrency", "4", "--request-count", "12", "--isl", "32", "--osl", "16", "--use-server-token-count"]
    load += ["--extra-inputs", "ignore_eos:true"]  # an answer that ends by itself would be shorter than was asked for
    out = ["--artifact-dir", str(tmp_path), "--ui", "none"]
    run(["aiperf", "profile", "--endpoint-type", kind, "--streaming", *where, *load, *out])
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 12 and not found.get("error_summary")
    assert found["time_to_first_token"]["avg"] > 0 and found["output_sequence_length"]["avg"] == 16


def test_lm_eval(service: Service, tmp_path: Path) -> None:
    """Choices by likelihood, where the prompt's own logarithms come back, and answers up to a stop."""
    rows = [{"q": f"the inn {number}", "c": [" in", " the", " hen"]} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    shared |= {"test_split": "test", "doc_to_text": "{{q}}"}
    chosen = {"task": "chosen", "output_type": "multiple_choice", "doc_to_choice": "{{c}}", "doc_to_target": 0}
    said = {"task": "said", "output_type": "generate_until", "doc_to_target": " in"}
    said |= {"generation_kwargs": {"until": ["zz"], "max_gen_toks": 8}}
    for task, metric in ((chosen, "acc"), (said, "exact_match")):
        text = json.dumps(shared | task | {"metric_list": [{"metric": metric}]})  # JSON is YAML
        (tmp_path / f"{task['task']}.yaml").write_text(text)
    model = f"model=tiny,base_url={service.url}/v1/completions,tokenizer={service.folder},num_concurrent=2"
    told = ["--model", "local-completions", "--model_args", model, "--tasks", "chosen,said"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OPENAI_API_KEY": KEY}
    table = run(["lm_eval", "run", *told, "--include_path", str(tmp_path)], **offline)
    assert "|chosen|" in table and "|said" in table
