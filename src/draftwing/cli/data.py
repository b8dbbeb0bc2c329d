"""``draftwing data regenerate | cache | import-states``, and ``draftwing datastore build | info``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftwing.cli import screen
from draftwing.cli.options import JSON, TARGET, Data, Model, argument, option, parse_taps, with_options
from draftwing.cli.progress import progress, token_rate
from draftwing.errors import ConfigError, shown
from draftwing.methods.registry import training_method, training_methods
from draftwing.models.catalogue import default_model
from draftwing.remote import download, local_copy

if TYPE_CHECKING:
    from draftwing.methods.suffix_array import Store
    from draftwing.sampling import Sampling
    from draftwing.train.answers import Task

data_app = typer.Typer(no_args_is_help=True, help="Prepare training data: `regenerate`, `cache`, `import-states`.")
datastore_app = typer.Typer(
    no_args_is_help=True, help="Build and describe datastores for retrieval (REST): `build`, `info`."
)


@dataclass(frozen=True)
class TapOptions:
    method: str = option(
        "eagle3",
        f"Keep the hidden states that this method reads: {', '.join(training_methods())}. Those of eagle3 also serve "
        f"eagle1 and hass.",
    )
    taps: str | None = option(None, "Keep these hidden states instead of the method's, such as 2,16,29.", expert=True)

    def chooser(self) -> Callable[[int], tuple[int, ...]]:
        """Return a function from the target's number of layers to the taps. Raises ConfigError for unknown ones."""
        if self.method not in training_methods():
            raise ConfigError(f"--method must be one of {', '.join(training_methods())}, found {self.method!r}")
        taps, net = parse_taps(self.taps), training_method(self.method)[0]
        return lambda num_layers: taps or tuple(tap for tap in net.taps(num_layers) if tap != num_layers)


@dataclass(frozen=True)
class Answers:
    draft: str | None = option(None, "Draft, which only saves time (see `draftwing generate --help`).", "-d")
    max_batch: int = option(16, "Prompts decoded at once here.", min=1)
    max_tokens: int = option(512, "Maximum number of tokens of an answer.", "-n", panel="Sampling")
    temperature: str = option(
        "0", "0 is greedy. With several, such as 0,1, each prompt's hash picks one.", "-T", panel="Sampling"
    )
    top_p: float = option(1.0, "Sample from the fewest tokens whose probabilities add up to P.", panel="Sampling")
    seed: int = option(0, "Base seed, from which each prompt derives its own.", panel="Sampling")
    server: list[str] | None = option(None, "Ask an OpenAI-compatible server at this URL instead. Repeatable.")
    served_model: str | None = option(None, "The target's name on that server.")
    api_key: str | None = option(None, "Key for the server.", envvar="OPENAI_API_KEY")
    num_parallel: int = option(16, "Requests to each server at once.", min=1)
    write_batch: Path | None = option(
        None, "Write what is not answered yet to this file, as requests of OpenAI's batch API (vLLM: run-batch)."
    )
    read_batch: list[str] | None = option(None, "Read a batch's answers from this file or URL. Repeatable.")

    def to_samplings(self) -> list[Sampling]:
        """Return the checked parameters for each temperature."""
        from draftwing.sampling import Sampling

        try:
            temperatures = sorted(map(float, self.temperature.split(",")))
        except ValueError:
            raise ConfigError(
                f"--temperature must be a number, or several such as 0,0.7,1, found {shown(self.temperature)}"
            ) from None
        same: dict[str, Any] = {"top_p": self.top_p, "max_tokens": self.max_tokens, "seed": self.seed}
        return [Sampling(temperature=temperature, **same) for temperature in temperatures]


@data_app.command("regenerate")
@with_options
def regenerate(
    model: Model,
    data: Data,
    answers: Answers,
    taps: TapOptions,
    out: Path = option(..., "JSONL file to append to: run again to continue.", "-o"),
    limit: int | None = option(None, "Use only the first N prompts.", min=1),
    features: Path | None = option(None, "Folder for the target's hidden states, which `train --cache` reads."),
    as_json: bool = JSON,
) -> None:
    """Answer the data's prompts with the target: a head learns best from its own target's answers.

    Examples:

    - `draftwing data regenerate --data dialogues.jsonl -o answered.jsonl -T 0.7`
    - `draftwing data regenerate --data dialogues.jsonl -o answered.jsonl -T 0,1 --features features`
    - `draftwing data regenerate --data chats.jsonl -o out.jsonl --server http://localhost:8000 --served-model my-model`
    - `draftwing data regenerate --data chats.jsonl -o out.jsonl --served-model my-model --write-batch requests.jsonl`
    - `draftwing data regenerate --data chats.jsonl -o out.jsonl --read-batch replies.jsonl`
    """
    from draftwing.formats.identity import target_id
    from draftwing.train.answer_local import LMAnswerer
    from draftwing.train.answer_server import ServerAnswerer
    from draftwing.train.answers import read_tasks
    from draftwing.train.answers import regenerate as run
    from draftwing.train.data import download_sources
    from draftwing.train.feature_cache import GrowingCache

    download_sources(data.sources, progress)
    download(answers.read_batch or [], progress)
    samplings = answers.to_samplings()
    answerer: LMAnswerer | ServerAnswerer
    tokenizer = cache = None
    read = partial(read_tasks, data.sources, limit=limit, output=out)
    if answers.write_batch is not None or answers.read_batch:
        if features is not None or answers.server:
            raise ConfigError(
                "--write-batch and --read-batch answer without model and server: drop --features, --server"
            )
        _regenerate_in_batches(answers, samplings, read(), out, as_json=as_json)
        return
    if answers.server:
        if features is not None:
            raise ConfigError("--features needs a model here: a server gives no hidden states; drop --server")
        if answers.served_model is None:
            raise ConfigError("--server needs --served-model: the name under which the server knows the target")
        answerer = ServerAnswerer(
            answers.server, answers.served_model, samplings, num_parallel=answers.num_parallel, api_key=answers.api_key
        )
    else:
        choose = taps.chooser()
        with progress("loading the target"):
            lm = model.load(answers.draft)
        tokenizer = lm.tokenizer
        if features is not None:
            identity = target_id(lm.target, tokenizer)
            cache = GrowingCache(features, lm.target, choose(lm.target.num_layers), identity=identity)
        states = () if cache is None else cache.info.states
        answerer = LMAnswerer(lm, samplings, max_batch=answers.max_batch, states=states)
    with progress("reading the prompts"):
        tasks = read(tokenizer=tokenizer)
    if cache is not None:
        max_tokens = sum(task.num_prompt_tokens + task.num_turns * answers.max_tokens for task in tasks)
        largest, per_token = cache.info.size(len(tasks), max_tokens), cache.info.size(0, 1).num_bytes
        screen.line(
            f"the features will have at most about {largest} ({per_token:,} bytes per token), if every answer has "
            f"{answers.max_tokens} tokens"
        )
    with _continued("answering", "prompts", token_rate(lambda: answerer.num_tokens)) as on_progress:
        done = run(tasks, answerer, out, cache=cache, on_progress=on_progress)
    for problem in answerer.gone if isinstance(answerer, ServerAnswerer) else ():
        screen.line(f"one server went down, the others continued: {problem}", "yellow")
    if as_json:
        size = None if cache is None else {"rows": cache.num_rows, **asdict(cache.size)}
        result = {**asdict(done), "tokens_per_s": done.tokens_per_s, "features": size}
        screen.print_json({"out": str(out), **result})
        return
    speed = f"{done.num_tokens:,} tokens, {done.tokens_per_s:,.0f} tokens/s"
    screen.line(f"wrote {done.num_written} records ({speed}) to {out}; {done.num_kept} were there")
    if features is not None and cache is not None:
        screen.line(f"{features} has {cache.num_rows} rows, {cache.size}")
        screen.line(_train_command(taps.method, model.target, features), "dim")
    _report_skipped(done.skipped, "could not be answered")


@contextmanager
def _continued(title: str, unit: str, detail: Callable[[], str] = str) -> Iterator[Callable[[int, int], None]]:
    """Show progress (see ``progress``); after Ctrl-C, report what is done, which the same command continues."""
    last = (0, 0)

    def count(done: int, total: int) -> None:
        nonlocal last
        last = done, total
        show(done, total)

    try:
        with progress(title, detail, resumes=True) as show:
            yield count
    except KeyboardInterrupt:
        done, total = last
        what = f"{done:,} of {total:,} {unit} are done" if total else "nothing is done yet"
        screen.line(f"stopped: {what}: run the same command again to continue", "yellow")
        raise


def _report_skipped(skipped: Sequence[tuple[str, str]], what: str) -> None:
    if skipped:
        where, why = skipped[0]
        screen.line(f"{len(skipped)} {what}, the first {where}: {why}", "yellow")


def _regenerate_in_batches(
    answers: Answers, samplings: Sequence[Sampling], tasks: Sequence[Task], out: Path, *, as_json: bool
) -> None:
    """Read a batch's answers, then write requests for what is not answered."""
    from draftwing.train.answer_batch import BatchAnswerer, write_requests
    from draftwing.train.answers import read_finished_ids
    from draftwing.train.answers import regenerate as run

    if answers.write_batch is not None and answers.served_model is None:
        raise ConfigError("--write-batch needs --served-model: the name under which the service knows the target")
    if str(answers.write_batch) in (answers.read_batch or []):
        raise ConfigError(f"{answers.write_batch}: is read and written at once: give another file to --write-batch")
    answerer, result = BatchAnswerer(answers.read_batch or []), {}
    if answers.read_batch:
        num_unknown = answerer.count_unknown(tasks)
        with progress("reading the answers", resumes=True) as on_progress:
            done = run(tasks, answerer, out, on_progress=on_progress)
        result = {**asdict(done), "open": answerer.num_open, "unknown": num_unknown, "unread": answerer.unread}
    num_requests = 0
    if answers.write_batch is not None and answers.served_model is not None:
        finished = read_finished_ids(out)
        num_requests = write_requests(
            answers.write_batch, tasks, answers.served_model, samplings, answered=answerer, finished=finished
        )
    if as_json:
        screen.print_json({"out": str(out), **result, "requests": num_requests})
        return
    if answers.read_batch:
        screen.line(
            f"wrote {done.num_written} records ({done.num_tokens:,} tokens) to {out}; {done.num_kept} were there, "
            f"{answerer.num_open} have turns without an answer"
        )
        _report_skipped(done.skipped, "could not be answered")
        _report_skipped(answerer.unread, "lines are no answers")
        if num_unknown:
            screen.line(f"{num_unknown} answers belong to no prompt of the data", "yellow")
    if answers.write_batch is None:
        return
    if num_requests:
        screen.line(f"wrote {num_requests} requests to {answers.write_batch}")
        screen.line(
            f"then: vllm run-batch -i {answers.write_batch} -o REPLIES --model MODEL, and --read-batch REPLIES", "dim"
        )
    else:
        screen.line(f"every prompt has an answer in {out}: no requests were written")


@data_app.command("cache")
@with_options
def cache(
    data: Data,
    taps: TapOptions,
    out: Path = option(..., "Folder of the cache: run again to continue.", "-o"),
    target: str | None = TARGET,
    max_length: int = option(512, "Maximum number of tokens of a window or dialogue."),
    tokens_per_batch: int = option(2048, "Tokens that the target reads at once.", expert=True),
    seed: int = option(0, "Seed of the places where documents are cut."),
    dtype: str | None = option(
        None, "Data type of the target. [default: bfloat16, if the device is fast at it]", expert=True
    ),
    device: str | None = option(None, "cpu or cuda. [default: cuda if available]"),
    as_json: bool = JSON,
) -> None:
    """Write the target's hidden states to disk, for `draftwing train --cache`: many runs, one pass of the target.

    It first reports how much it will write: about 2 bytes for each token, hidden state and channel.

    Examples:

    - `draftwing data cache --data dialogues.jsonl -o features`
    - `draftwing train eagle3 --cache features --minutes 15 -o my-head`
    """
    from draftwing.formats.identity import target_id
    from draftwing.loading import load_target, training_dtype
    from draftwing.models.resolve import resolve
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data import Batches, download_sources, read_examples
    from draftwing.train.feature_cache import estimate, write_cache

    choose = taps.chooser()
    folder = resolve(target)
    tokenizer = Tokenizer(folder)
    download_sources(data.sources, progress)
    with progress("reading the data") as on_data:
        corpus = read_examples(data.sources, tokenizer, max_length=max_length, on_progress=on_data)
    batches = Batches(corpus, tokens_per_batch, max_length, seed)
    name = target or default_model()
    with progress("loading the target"):
        model = load_target(folder, dtype=dtype or training_dtype(device), device=device, name=name, prepack=False)
    layers, identity = choose(model.num_layers), target_id(model, tokenizer)
    screen.line(f"the cache will have {estimate(model, batches, layers)}")
    with _continued("running the target, tokens", "tokens") as on_progress:
        done = write_cache(out, model, batches, layers, identity=identity, on_progress=on_progress)
    if as_json:
        screen.print_json({"out": str(out), **asdict(done)})
        return
    screen.line(f"wrote {done.num_shards - done.num_kept} shards to {out}; {done.num_kept} were there")
    screen.line(_train_command(taps.method, target, out), "dim")


@data_app.command("import-states")
@with_options
def import_states(
    data: Data,
    taps: TapOptions,
    folder: str = argument(..., "Folder (or its URL) of the engine's files: vLLM's shared_storage_path."),
    engine: str = option(..., "The engine: vllm (its method extract_hidden_states).", "--from"),
    out: Path = option(..., "Folder of the cache: run again to continue.", "-o"),
    target: str | None = TARGET,
    layer_ids: str | None = option(
        None, "vLLM's eagle_aux_hidden_state_layer_ids. [default: the method's taps, and the number of layers]"
    ),
    dtype: str = option("bfloat16", "Data type of the target.", expert=True),
    device: str | None = option(None, "cpu or cuda. [default: cuda if available]"),
    as_json: bool = JSON,
) -> None:
    """Make a cache for `draftwing train --cache` of hidden states that another engine wrote, on any number of nodes.

    `--data` has the dialogues that the engine read, whose answers count in the loss; without it every token counts. Of
    the target only the embedding, the final norm and the LM head are read.

    Examples:

    - `draftwing data import-states states --from vllm -t path/or/hub-id --data answers.jsonl -o features`
    - `draftwing data import-states states --from vllm -t path/or/hub-id --layer-ids 2,18,33,36 -o features`
    - `draftwing train eagle3 -t path/or/hub-id --cache features --ends-only --minutes 60 -o head`
    """
    from draftwing.formats.identity import target_id
    from draftwing.loading import load_target
    from draftwing.models.lean import LeanTarget
    from draftwing.models.resolve import resolve
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data import download_sources, read_examples
    from draftwing.train.vllm_states import import_states as run

    if engine != "vllm":
        raise ConfigError(f"--from must be vllm, found {shown(engine)}")
    choose, layers, place = taps.chooser(), parse_taps(layer_ids, "--layer-ids"), resolve(target)
    tokenizer = Tokenizer(place)
    name = target or default_model()
    download([folder], progress)
    download_sources(data.sources, progress)
    with progress("loading the ends of the target"):
        model = load_target(place, dtype=dtype, device=device, name=name, prepack=False, layers=False)
    assert isinstance(model, LeanTarget)  # others cannot be loaded without layers
    dialogues = None
    if data.sources:
        with progress("reading the data") as on_data:
            corpus = read_examples(data.sources, tokenizer, max_length=model.max_length, on_progress=on_data)
        dialogues = corpus.examples
    with _continued("reading the states, files", "files") as on_progress:
        done = run(
            local_copy(folder), out, model, choose(model.num_layers),
            identity=target_id(model, tokenizer), layers=layers, dialogues=dialogues, on_progress=on_progress,
        )  # fmt: skip
    if as_json:
        screen.print_json({"out": str(out), **asdict(done)})
        return
    screen.line(f"{out} has {done.num_rows} rows, {done.size}; {done.num_kept} were there")
    if done.agreement is not None:
        screen.line(
            f"the LM head predicts {done.agreement:.0%} of the tokens that count: near 0 if the layers or the target "
            f"are not those that vLLM ran"
        )
    _report_skipped(done.skipped, "files were left out")
    if done.num_missing:
        screen.line(
            f"{done.num_missing} of {len(dialogues or [])} dialogues have no file: their requests failed, or vLLM was "
            f"stopped before it wrote them",
            "yellow",
        )
    screen.line(_train_command(taps.method, target, out, "--ends-only"), "dim")


def _train_command(method: str, target: str | None, cache: Path, *options: str) -> str:
    model = [] if target is None else ["--target", target]
    words = ["train", method, *model, "--cache", str(cache), *options, "--minutes", "60", "-o", "my-head"]
    return f"train on it: draftwing {shlex.join(words)}"


@datastore_app.command("build")
@with_options
def build(
    files: list[str] = argument(..., "Text files, JSONL files as for `train --data`, or folders of them."),
    out: Path = option(..., "Folder to write; it must be new.", "-o"),
    target: str | None = TARGET,
    as_json: bool = JSON,
) -> None:
    """Make a datastore of texts like those that the target will write; `--draft FOLDER` then drafts from it.

    It holds the texts as ids of the target's tokenizer (no weights are read), and 8 bytes on disk for each token.
    `pip install 'draftwing[train]'` sorts large ones several times as fast.

    Examples:

    - `draftwing datastore build src docs --target path/or/hub-id --out project-store`
    - `draftwing datastore build answered.jsonl -t smollm2-135m-instruct -o answers-store --json`
    - `draftwing generate "def main(" --target path/or/hub-id --draft project-store`
    """
    from draftwing import __version__
    from draftwing.methods.suffix_array import SuffixArray, check_new_datastore, write_datastore
    from draftwing.models.resolve import resolve
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data import download_sources, read_texts

    check_new_datastore(out)
    download_sources(files, progress)
    tokenizer = Tokenizer(resolve(target))
    with progress("reading the texts, bytes") as on_progress:
        ids, num_files = read_texts(files, tokenizer, on_progress)
    identity = {
        "target": target or default_model(),
        "vocab_size": max(tokenizer.fast.get_vocab().values()) + 1,
        "vocab_hash": tokenizer.vocab_hash,
    }
    with progress(f"sorting {len(ids):,} tokens"):
        about = {**identity, "num_files": num_files, "draftwing": __version__}
        store = write_datastore(out, SuffixArray(ids), about)
    if as_json:
        screen.print_json(_describe(out, store))
        return
    num_tokens, num_texts = store.about["num_tokens"], store.about["num_texts"]
    screen.line(f"wrote {out}: {num_tokens:,} tokens in {num_texts:,} texts, {store.num_bytes / 1e6:,.1f} MB")
    screen.line(f"draft from it: draftwing generate ... --draft {out}", "dim")


@datastore_app.command("info")
@with_options
def info(
    folder: Path = argument(..., "A datastore."),
    check: bool = option(False, "Read all of it, and check that nothing is damaged."),
    as_json: bool = JSON,
) -> None:
    """Describe a datastore: its texts, its tokenizer and its size.

    Examples:

    - `draftwing datastore info project-store`
    - `draftwing datastore info project-store --check --json`
    """
    from draftwing.methods.suffix_array import read_datastore

    values = _describe(folder, read_datastore(folder, whole=check))
    if as_json:
        screen.print_json({**values, "checked": check})
    else:
        checked = "all of it" if check else "in part (all with --check)"
        screen.print_sections({"datastore": {**values, "checked": checked}})


def _describe(folder: Path, store: Store) -> dict[str, Any]:
    names = ("num_tokens", "num_texts", "num_files", "target", "vocab_size", "vocab_hash", "identity")
    return {"folder": str(folder), **{name: store.about.get(name) for name in names}, "num_bytes": store.num_bytes}
