"""``draftwing data regenerate | cache``: answers in the target's own words, and its hidden states on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwing.cli import screen
from draftwing.cli import screen as tables
from draftwing.cli.options import Data, Json, Model, Target, or_of, sampling_option, taps_of, with_options
from draftwing.cli.progress import progress, token_rate
from draftwing.errors import ConfigError, shown
from draftwing.methods.registry import training_method, training_methods

if TYPE_CHECKING:
    from draftwing.lm import LM
    from draftwing.methods.suffix_array import Store
    from draftwing.sampling import Sampling
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.answer_server import ServerAnswerer
    from draftwing.train.answers import Task
    from draftwing.train.feature_cache import GrowingCache


data_app = typer.Typer(no_args_is_help=True, help="Prepare training data: `regenerate`, `cache`.")


Method = Annotated[
    str,
    typer.Option(
        "--method",
        help=f"Keep what it reads: {or_of(training_methods())}; eagle3's hidden states serve eagle1 and hass too.",
    ),
]
Taps = Annotated[str | None, typer.Option("--taps", help="Other hidden states than the method's, such as 2,16,29.")]


def tap_chooser(method: str, taps: str | None) -> Callable[[int], tuple[int, ...]]:
    """What says which hidden states to keep of a target of so many layers, beside its last, which always is.

    Raises:
        ConfigError: at once, where ``method`` or ``taps`` cannot be meant.
    """
    if method not in training_methods():
        raise ConfigError(f"--method must be one of {', '.join(training_methods())}, found {method!r}")
    kind, own = training_method(method)[0], taps_of(taps)
    return lambda num_layers: own or tuple(tap for tap in kind.taps(num_layers) if tap != num_layers)


@dataclasses.dataclass(frozen=True)
class Server:
    """Who answers, where that is not a model here."""

    server: Annotated[
        list[str] | None,
        typer.Option("--server", help="Ask an OpenAI-compatible server at this URL instead. Repeatable."),
    ] = None
    served_model: Annotated[str | None, typer.Option("--served-model", help="The target's name on that server.")] = None
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Of the server.")] = None
    num_parallel: Annotated[int, typer.Option("--num-parallel", min=1, help="Requests to each at once.")] = 16


@dataclasses.dataclass(frozen=True)
class Answers:
    """How the prompts are answered."""

    draft: Annotated[str | None, typer.Option("--draft", "-d", help="As in generate; it only saves time.")] = None
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Prompts decoded at once here.")] = 16
    max_tokens: Annotated[int, sampling_option("Of each answer.", "--max-tokens", "-n")] = 512
    temperature: Annotated[
        str,
        sampling_option(
            "0 is greedy. Several, such as 0,1: each prompt gets one of them, by a hash of it.", "--temperature", "-T"
        ),
    ] = "0"
    top_p: Annotated[float, sampling_option("Draw from the fewest tokens of this probability.", "--top-p")] = 1.0
    seed: Annotated[int, sampling_option("Each prompt gets one of its own made of it.", "--seed")] = 0

    def to_sampling(self) -> list[Sampling]:
        """The checked parameters, for each temperature."""
        from draftwing.sampling import Sampling

        try:
            temperatures = sorted(map(float, self.temperature.split(",")))
        except ValueError:
            raise ConfigError(
                f"--temperature must be a number, or several such as 0,0.7,1, found {shown(self.temperature)}"
            ) from None
        return [
            Sampling(temperature=each, top_p=self.top_p, max_tokens=self.max_tokens, seed=self.seed)
            for each in temperatures
        ]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What becomes a prompt."""

    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of a document, as its prompt.")] = 64
    per_document: Annotated[int, typer.Option("--per-document", help="Prompts cut from a document at most.")] = 1
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first so many prompts alone.")] = None

    def read(self, data: Data, out: Path, tokenizer: Tokenizer | None) -> list[Task]:
        """The data's prompts."""
        from draftwing.train.answers import read_tasks

        return read_tasks(data.sources, **vars(self), tokenizer=tokenizer, exclude=data.exclude, output=out)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is kept beside the answers."""

    features: Annotated[
        Path | None,
        typer.Option(
            "--features",
            help="Folder for the hidden states that the target has on the way: `train --cache` reads them, and needs "
            "no pass of the target.",
        ),
    ] = None
    method: Method = "eagle3"
    taps: Taps = None

    def load(self, model: Model, draft: str | None) -> tuple[LM, GrowingCache | None]:
        """The model, and the cache of its states where one is wanted."""
        from draftwing.formats.identity import target_id
        from draftwing.loading import load
        from draftwing.train.feature_cache import GrowingCache

        taps = tap_chooser(self.method, self.taps)
        lm = load(**vars(model), draft=draft)
        if self.features is None:
            return lm, None
        identity = target_id(lm.target, lm.tokenizer)
        return lm, GrowingCache(self.features, lm.target, taps(lm.target.num_layers), identity=identity)


@data_app.command("regenerate")
@with_options
def regenerate(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL file, appended to: run again to go on.")],
    server: Server,
    answers: Answers,
    asked: Asked,
    kept: Kept,
    as_json: Json = False,
) -> None:
    """Answer the data's prompts with the target itself: a head learns to guess what its own target says.

    Examples:

    - `draftwing data regenerate --data dialogues.jsonl -o answered.jsonl -T 0.7`

    - `draftwing data regenerate --data dialogues.jsonl -o answered.jsonl -T 0,1 --features features`

    - `draftwing data regenerate --data chats.jsonl -o out.jsonl --server http://localhost:8000 --served-model my-model`
    """
    from draftwing.train.answer_local import LMAnswerer
    from draftwing.train.answer_server import ServerAnswerer
    from draftwing.train.answers import regenerate as run

    sampling = answers.to_sampling()
    answerer: LMAnswerer | ServerAnswerer
    if server.server:
        if kept.features is not None:
            raise ConfigError("--features needs a model here: a server gives no hidden states; drop --server")
        answerer, tokenizer, cache = _served(server, sampling), None, None
    else:
        lm, cache = kept.load(model, answers.draft)
        states = () if cache is None else cache.info.states
        answerer, tokenizer = LMAnswerer(lm, sampling, max_batch=answers.max_batch, states=states), lm.tokenizer
    tasks = asked.read(data, out, tokenizer)
    if cache is not None:
        _tell_size(cache, tasks, answers.max_tokens)
    with progress("answering", token_rate(lambda: answerer.num_tokens), resumes=True) as on_progress:
        done = run(tasks, answerer, out, cache=cache, on_progress=on_progress)
    for problem in answerer.gone if isinstance(answerer, ServerAnswerer) else ():
        screen.line(f"one server went down, the others went on: {problem}", "yellow")
    if as_json:
        kept_states = None if cache is None else {"rows": cache.num_rows, **dataclasses.asdict(cache.size)}
        result = {**dataclasses.asdict(done), "tokens_per_s": done.tokens_per_s, "features": kept_states}
        screen.print_json({"out": str(out), **result})
        return
    speed = f"{done.num_tokens:,} tokens, {done.tokens_per_s:,.0f} tokens/s"
    screen.line(f"wrote {done.num_written} records ({speed}) to {out}; {done.num_kept} were there")
    if cache is not None:
        screen.line(f"{kept.features} has {cache.num_rows} rows, {cache.size}")
        screen.line(f"train on it: draftwing train {kept.method} ... --cache {kept.features}", "dim")
    if done.skipped:
        where, why = done.skipped[0]
        screen.line(f"{len(done.skipped)} could not be answered, the first {where}: {why}", "yellow")


def _served(server: Server, sampling: list[Sampling]) -> ServerAnswerer:
    from draftwing.train.answer_server import ServerAnswerer

    if server.served_model is None:
        raise ConfigError("--server needs --served-model: the name under which the server knows the target")
    parallel, key = server.num_parallel, server.api_key
    return ServerAnswerer(server.server or [], server.served_model, sampling, num_parallel=parallel, api_key=key)


def _tell_size(cache: GrowingCache, tasks: list[Task], max_tokens: int) -> None:
    """How large the cache may get. How long answers are nobody knows; most end long before they must."""
    tokens = sum(task.num_prompt_tokens + task.num_turns * max_tokens for task in tasks)
    most, each = cache.info.size(len(tasks), tokens), cache.info.size(0, 1).num_bytes
    screen.line(
        f"the features will have at most about {most} ({each:,} bytes each), if every answer takes its {max_tokens} "
        f"tokens"
    )


@dataclasses.dataclass(frozen=True)
class Features:
    """Which hidden states of what are kept."""

    target: Target = None
    method: Method = "eagle3"
    taps: Taps = None
    max_length: Annotated[int, typer.Option("--max-length", help="Tokens of a window or dialogue.")] = 512
    tokens_per_batch: Annotated[int, typer.Option("--tokens-per-batch", help="Tokens run at once.")] = 2048
    validation_share: Annotated[
        float, typer.Option("--validation-share", help="Share of the data held out: as `train` will have it.")
    ] = 0.02
    seed: Annotated[int, typer.Option("--seed", help="Of what is held out, and where documents are cut.")] = 0
    dtype: Annotated[str, typer.Option("--dtype", help="Of the target.")] = "bfloat16"
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. [default: cuda if there is one]")] = None


@data_app.command("cache")
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
    from draftwing.formats.identity import target_id
    from draftwing.loading import load_target
    from draftwing.models.catalogue import default_model
    from draftwing.models.resolve import resolve
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data import Batches, read_examples, split
    from draftwing.train.feature_cache import estimate, write_cache

    length, share = features.max_length, features.validation_share
    chosen = tap_chooser(features.method, features.taps)
    folder = resolve(features.target)
    tokenizer = Tokenizer(folder)
    with progress("reading the data") as on_data:
        corpus = read_examples(data.sources, tokenizer, max_length=length, exclude=data.exclude, on_progress=on_data)
    training, _ = split(corpus, share, features.seed)
    batches = Batches(training, features.tokens_per_batch, length, features.seed)
    name = str(features.target or default_model())
    model = load_target(folder, dtype=features.dtype, device=features.device, name=name, prepack=False)
    taps = chosen(model.num_layers)
    screen.line(f"the cache will have {estimate(model, batches, taps)}")
    own = target_id(model, tokenizer)
    with progress("running the target") as on_progress:
        done = write_cache(out, model, batches, taps, identity=own, validation_share=share, on_progress=on_progress)
    if as_json:
        screen.print_json({"out": str(out), **dataclasses.asdict(done)})
        return
    screen.line(f"wrote {done.num_shards - done.num_kept} shards to {out}; {done.num_kept} were there")
    settings = f"--max-length {length} --validation-share {share}"
    screen.line(f"train on it: draftwing train {features.method} ... --cache {out} {settings}", "dim")


# ``draftwing datastore build | info``: texts that drafts are retrieved from.


datastore_app = typer.Typer(
    no_args_is_help=True, help="Build and describe datastores for retrieval (REST): `build`, `info`."
)


@datastore_app.command("build")
def build(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Text files, JSONL files of texts or dialogues (as for `train --data`), or folders of them."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must be new.")],
    target: Target = None,
    exclude: Annotated[
        Path | None, typer.Option("--exclude", help="File of names (globs, or prefix/) to leave out of folders.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a datastore of texts like those that the target will write; `--draft FOLDER` then drafts from it.

    It holds the texts as ids of the target's tokenizer (no weights are read), and 8 bytes on disk for each token.
    `pip install 'draftwing[datastore]'` sorts large ones several times as fast.

    Examples:

    - `draftwing datastore build src docs --target path/or/hub-id --out project-store`

    - `draftwing datastore build answered.jsonl -t smollm2-135m-instruct -o answers-store --json`

    - `draftwing generate "def main(" --target path/or/hub-id --draft project-store`
    """
    from draftwing.methods.suffix_array import check_new_datastore
    from draftwing.models.catalogue import default_model
    from draftwing.models.resolve import resolve
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.datastore import build_datastore, read_texts

    check_new_datastore(out)
    tokenizer = Tokenizer(resolve(target))
    with progress("reading the texts, bytes") as on_progress:
        texts = read_texts(files, tokenizer, exclude=exclude, on_progress=on_progress)
    with progress(f"sorting {len(texts.tokens):,} tokens"):
        store = build_datastore(out, texts, tokenizer, str(target or default_model()))
    if as_json:
        screen.print_json(_described(out, store))
        return
    about = store.about
    screen.line(
        f"wrote {out}: {about['num_tokens']:,} tokens in {about['num_texts']:,} texts, {store.num_bytes / 1e6:,.1f} MB"
    )
    screen.line(f"draft from it: draftwing generate ... --draft {out}", "dim")


@datastore_app.command("info")
def info(
    folder: Annotated[Path, typer.Argument(help="A datastore.")],
    check: Annotated[bool, typer.Option("--check", help="Read all of it, and see that nothing is damaged.")] = False,
    as_json: Json = False,
) -> None:
    """Describe a datastore: its texts, whose tokenizer it is for, and its size.

    Examples:

    - `draftwing datastore info project-store`

    - `draftwing datastore info project-store --check --json`
    """
    from draftwing.methods.suffix_array import read_datastore

    store = read_datastore(folder, whole=check)
    found = _described(folder, store)
    if as_json:
        screen.print_json({**found, "checked": check})
    else:
        tables.print_info({"datastore": {**found, "checked": "all of it" if check else "in part (all with --check)"}})


def _described(folder: Path, store: Store) -> dict[str, Any]:
    about = store.about
    names = ("num_tokens", "num_texts", "num_files", "target", "vocab_size", "vocab_hash", "identity")
    return {"folder": str(folder), **{name: about.get(name) for name in names}, "num_bytes": store.num_bytes}
