"""``draftwing data regenerate | cache``: answers in the target's own words, and its hidden states on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwing.cli import screen
from draftwing.cli.options import Data, Json, Model, Target, or_of, sampling_option, taps_of, with_options
from draftwing.cli.progress import progress
from draftwing.drafters.kinds import method_named, methods
from draftwing.errors import ConfigError

if TYPE_CHECKING:
    from draftwing.sampling import Sampling
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.answers.regenerate import Answerer, Task

__all__ = ["register"]

_app = typer.Typer(no_args_is_help=True, help="Prepare training data: `regenerate`, `cache`.")


@dataclasses.dataclass(frozen=True)
class Server:
    """Who answers, where that is not a model here."""

    server: Annotated[
        str | None, typer.Option("--server", help="Ask an OpenAI-compatible server at this URL instead.")
    ] = None
    served_model: Annotated[str | None, typer.Option("--served-model", help="The target's name on that server.")] = None
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Of the server.")] = None
    num_parallel: Annotated[int, typer.Option("--num-parallel", min=1, help="Requests to it at once.")] = 16


@dataclasses.dataclass(frozen=True)
class Answers:
    """How the prompts are answered."""

    draft: Annotated[str | None, typer.Option("--draft", "-d", help="As in generate; it only saves time.")] = None
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Prompts decoded at once here.")] = 16
    max_tokens: Annotated[int, sampling_option("Of each answer.", "--max-tokens", "-n")] = 512
    temperature: Annotated[float, sampling_option("0 is greedy.", "--temperature", "-T")] = 0.0
    top_p: Annotated[float, sampling_option("Draw from the fewest tokens of this probability.", "--top-p")] = 1.0
    seed: Annotated[int, sampling_option("Each prompt gets one of its own made of it.", "--seed")] = 0

    def to_sampling(self) -> Sampling:
        """The checked parameters."""
        from draftwing.sampling import Sampling

        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, seed=self.seed)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What becomes a prompt."""

    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of a document, as its prompt.")] = 64
    per_document: Annotated[int, typer.Option("--per-document", help="Prompts cut from a document at most.")] = 1
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first so many prompts alone.")] = None

    def read(self, data: Data, out: Path, tokenizer: Tokenizer | None) -> list[Task]:
        """The data's prompts."""
        from draftwing.train.answers.regenerate import read_tasks

        return read_tasks(data.data, **vars(self), tokenizer=tokenizer, exclude=data.exclude, output=out)


@_app.command("regenerate")
@with_options
def regenerate(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL file, appended to: run again to go on.")],
    server: Server,
    answers: Answers,
    asked: Asked,
    as_json: Json = False,
) -> None:
    """Answer the data's prompts with the target itself: a head learns to guess what its own target says.

    Examples:

    - `draftwing data regenerate --data dialogues.jsonl -o answered.jsonl -T 0.7`

    - `draftwing data regenerate --data chats.jsonl -o out.jsonl --server http://localhost:8000 --served-model my-model`
    """
    from draftwing.train.answers.regenerate import regenerate as run

    answerer, tokenizer = _answerer(model, server, answers)
    tasks = asked.read(data, out, tokenizer)
    with progress("answering") as on_progress:
        done = run(tasks, answerer, out, on_progress=on_progress)
    if as_json:
        screen.print_json({"out": str(out), **dataclasses.asdict(done)})
        return
    screen.line(f"wrote {done.num_written} records ({done.num_tokens} tokens) to {out}; {done.num_kept} were there")
    if done.skipped:
        where, why = done.skipped[0]
        screen.line(f"{len(done.skipped)} could not be answered, the first {where}: {why}", "yellow")


def _answerer(model: Model, server: Server, answers: Answers) -> tuple[Answerer, Tokenizer | None]:
    """Who answers, and the tokenizer that counts tokens; a server's is not known."""
    from draftwing.api import load
    from draftwing.train.answers.regenerate import LMAnswerer
    from draftwing.train.answers.server import ServerAnswerer

    sampling = answers.to_sampling()
    if server.server is None:
        lm = load(**vars(model), draft=answers.draft)
        return LMAnswerer(lm, sampling, max_batch=answers.max_batch), lm.tokenizer
    if server.served_model is None:
        raise ConfigError("--server needs --served-model: the name under which the server knows the target")
    parallel, key = server.num_parallel, server.api_key
    return ServerAnswerer(server.server, server.served_model, sampling, num_parallel=parallel, api_key=key), None


@dataclasses.dataclass(frozen=True)
class Features:
    """Which hidden states of what are kept."""

    target: Target = None
    method: Annotated[
        str, typer.Option("--method", help=f"{or_of(methods())}: what eagle3 reads serves eagle1 and hass too.")
    ] = "eagle3"
    taps: Annotated[
        str | None, typer.Option("--taps", help="Other hidden states than the method's, such as 2,16,29.")
    ] = None
    max_length: Annotated[int, typer.Option("--max-length", help="Tokens of a window or dialogue.")] = 512
    tokens_per_batch: Annotated[int, typer.Option("--tokens-per-batch", help="Tokens run at once.")] = 2048
    validation_share: Annotated[
        float, typer.Option("--validation-share", help="Share of the data held out: as `train` will have it.")
    ] = 0.02
    seed: Annotated[int, typer.Option("--seed", help="Of what is held out, and where documents are cut.")] = 0
    dtype: Annotated[str, typer.Option("--dtype", help="Of the target.")] = "bfloat16"
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. [default: cuda if there is one]")] = None


@_app.command("cache")
@with_options
def cache(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the cache: run again to go on.")],
    features: Features,
    as_json: Json = False,
) -> None:
    """Write the target's hidden states to disk, for `draftwing train --cache`: many runs, one pass of the target.

    It says first how much it will write: about 2 bytes for each token, hidden state and channel.

    Examples:

    - `draftwing data cache --data dialogues.jsonl -o features`

    - `draftwing train eagle3 --data dialogues.jsonl --cache features --minutes 15 -o my-head`
    """
    from draftwing.api import load_target
    from draftwing.heads.identity import target_id
    from draftwing.model.resolve import resolve
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data.batches import Batches
    from draftwing.train.data.files import read_examples, split
    from draftwing.train.features.cache_writer import estimate, write_cache

    method, length, share = features.method, features.max_length, features.validation_share
    if method not in methods():
        raise ConfigError(f"--method must be one of {', '.join(methods())}, found {method!r}")
    kind, _ = method_named(method)
    taps = taps_of(features.taps)
    folder = resolve(features.target)
    tokenizer = Tokenizer(folder)
    with progress("reading the data") as on_data:
        corpus = read_examples(data.data, tokenizer, max_length=length, exclude=data.exclude, on_progress=on_data)
    training, _ = split(corpus, share, features.seed)
    batches = Batches(training, features.tokens_per_batch, length, features.seed)
    name = str(features.target or "draftwing/target")
    model = load_target(folder, dtype=features.dtype, device=features.device, name=name, prepack=False)
    if taps is None:
        taps = tuple(tap for tap in kind.taps(model.num_layers) if tap != model.num_layers)  # which is always kept
    screen.line(f"the cache will have {estimate(model, batches, taps)}")
    own = target_id(model, tokenizer)
    with progress("running the target") as on_progress:
        done = write_cache(out, model, batches, taps, identity=own, validation_share=share, on_progress=on_progress)
    if as_json:
        screen.print_json({"out": str(out), **dataclasses.asdict(done)})
        return
    screen.line(f"wrote {done.num_shards - done.num_kept} shards to {out}; {done.num_kept} were there")
    settings = f"--max-length {length} --validation-share {share}"
    screen.line(f"train on it: draftwing train {method} ... --cache {out} {settings}", "dim")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(_app, name="data")
