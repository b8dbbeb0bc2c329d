"""The inspector's page in a browser: a text, its steps, a comparison, a lesson; a phone, the dark, and whoever listens.

Skipped where there is no Chromium: ``make`` installs playwright, but no browser.
"""

import gzip
import re
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

import draftwing as dw
from conftest import add_tokenizer
from draftwing.serve.app import Settings, make_app
from serving import HTTP

PAGE = Path(dw.__file__).parent / "serve" / "page"
AXE = Path(__file__).parent / "vendor" / "axe.min.js.gz"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"
PROMPT = "def quicksort(items):\n    if len(items) <= 1:\n        return items\n"
KEY = "a-key"
SEED = 2  # its text at temperatures 0.7 and 0.8 is longer than a step


@contextmanager
def served(lm, **settings):
    """The address of a server that runs in a thread."""
    app = make_app(lm, Settings(names=("toy",), **settings))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", loop="asyncio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def toy():
    """A target with a real head, which goes on with texts."""
    lm = dw.load(draft="eagle3", device="cpu", budget=dw.Budget(4, 3, 12))
    with served(lm) as address:
        yield address, lm


@pytest.fixture(scope="module")
def chat(folder_of, tmp_path_factory):
    """A tiny random chat model behind a key."""
    folder = tmp_path_factory.mktemp("page") / "target"
    add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), folder), chat_template=TEMPLATE)
    lm = dw.load(folder, draft="lookup", device="cpu")
    with served(lm, api_keys=(KEY,)) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens pages; at the end none may have raised, logged an error, or asked for anything from elsewhere."""
    contexts, wrong, asked = [], [], set()

    def get(address, *, expects=(), **options):
        options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console", lambda said: said.type == "error" and not _among(said.text, expects) and wrong.append(said.text)
        )
        page.on("request", lambda request: asked.add(request.url.split("/")[2]))
        page.goto(address)
        assert asked == {address.split("/")[2]}
        return page

    yield get
    for context in contexts:
        context.close()
    assert not wrong
    assert len(asked) <= 1


def _among(text, expects):
    return any(each in text for each in expects)


def set_number(page, name, value):
    field = page.get_by_role("spinbutton", name=name)
    field.fill(str(value))
    field.blur()


def write(page, prompt=PROMPT, tokens=24):
    set_number(page, "Tokens", tokens)
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Enter")
    page.locator(".facts").first.wait_for()


def serious(page):
    """What axe-core finds that keeps somebody out."""
    page.evaluate(gzip.decompress(AXE.read_bytes()).decode())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html'][:120]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


# --- without a browser ----------------------------------------------------------------------------------------------


def test_every_file_forbids_what_is_elsewhere(toy):
    names = ["", *(str(each.relative_to(PAGE)) for each in PAGE.rglob("*") if each.is_file())]
    for name in names:
        found = HTTP.get(f"{toy[0]}/{name}")
        policy = found.headers["content-security-policy"]
        assert found.status_code == 200
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy  # noqa: PT018
        assert found.headers["x-content-type-options"] == "nosniff"
        if name.endswith(".js"):
            assert found.headers["content-type"].startswith("text/javascript")
    own = [each for each in PAGE.glob("*") if each.is_file()]
    assert not [each.name for each in own if re.search(r"https?://(?!www\.w3\.org/2000/svg)", each.read_text())]


def test_what_is_vendored_is_small_and_has_its_licences():
    vendor = PAGE / "vendor"
    assert sum(each.stat().st_size for each in vendor.glob("*.*s")) < 85_000
    licences = {each.name for each in vendor.glob("LICENSE-*")}
    assert licences == {"LICENSE-htm", "LICENSE-preact", "LICENSE-d3-hierarchy", "LICENSE-uplot"}


def test_the_state_names_what_may_be_chosen(toy):
    address, lm = toy
    state = HTTP.get(f"{address}/inspector/state").json()
    assert [draft["name"] for draft in state["drafts"]] == ["eagle3", "none"]
    assert tuple(state["drafts"][0]["taps"]) == lm.new_drafter().features.taps
    assert state["num_layers"] == lm.target.num_layers
    assert (state["model"], state["is_chat"], state["needs_key"], state["tree"]) == (
        "toy", False, False, "dynamic:12,4,3",
    )  # fmt: skip


def test_keys_guard_the_inspector(chat):
    assert HTTP.get(f"{chat}/").status_code == 200
    for path in ("state", "costs"):
        assert HTTP.get(f"{chat}/inspector/{path}").status_code == 401
    assert HTTP.post(f"{chat}/inspector/lesson", json={}).status_code == 401


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"draft": "medusa"}, "choose eagle3"),
        ({"token_ids": [10**9]}, "tokens of this model"),
        ({"token_ids": [5] * 4096}, "choose a place before"),
        ({"prompt": "x " * 9000}, "shorten it"),
        ({"prompt": None}, "either messages or a prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "either messages or a prompt"),
        ({"temperature": -1}, "temperature"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_lessons_that_cannot_be_are_refused(toy, change, says):
    body = {"prompt": PROMPT, "token_ids": [], "draft": "eagle3", **change}
    found = HTTP.post(f"{toy[0]}/inspector/lesson", json=body)
    assert found.status_code == 400
    assert says in found.json()["error"]["message"]


def test_a_lesson_stands_where_its_text_stands(toy):
    address, lm = toy
    ids = lm.generate(PROMPT, max_tokens=4)[0].token_ids
    body = {"prompt": PROMPT, "token_ids": ids, "draft": "eagle3", "temperature": 0.5, "seed": 1}
    told = HTTP.post(f"{address}/inspector/lesson", json=body).json()
    assert told["temperature"] == 0.5
    assert told["chain"]["root"]["id"] == ids[-1]
    plainly = HTTP.post(f"{address}/inspector/lesson", json={**body, "draft": "none"}).json()
    assert "choose one" in plainly["why"]


# --- in a browser ---------------------------------------------------------------------------------------------------


def test_a_text_and_its_steps(toy, opened):
    address, lm = toy
    page = opened(address)
    page.get_by_role("heading", name="See drafts being accepted").wait_for()
    assert not serious(page)
    write(page)
    wanted = lm.generate(PROMPT, max_tokens=24)[0]
    assert page.locator(".turn .text").text_content() == wanted.text
    assert page.locator(".text .accepted").count() > 0
    shown = page.locator(".stepper output")
    page.locator(".facts").click()
    page.keyboard.press("Home")
    shown.filter(has_text=f"step 1 of {wanted.stats.num_forwards}").wait_for()
    page.keyboard.press("ArrowRight")
    shown.filter(has_text="step 2 of").wait_for()
    steps = [each.step for each in lm.stream(PROMPT, max_tokens=24)]
    row = steps[1].rows[0]
    assert page.locator(".say").inner_text().startswith(f"Drafted {row.num_drafted}, kept {row.num_accepted}")
    assert page.locator(".tree .node").count() == row.num_drafted + 2  # with the root, and what the target added
    assert page.locator(".tree .node.kept").count() == row.num_accepted
    assert f"{row.num_drafted} tokens drafted" in page.get_by_role("img").first.get_attribute("aria-label")
    page.get_by_text("The tree as a table").click()
    page.locator("table.nodes tbody tr").nth(row.num_drafted + 1).wait_for()
    assert page.locator("table.nodes tbody tr").count() == row.num_drafted + 2
    assert page.locator(".plot canvas").count() == 4
    assert "Costs are learned" in page.locator(".plots .empty").inner_text()
    assert not serious(page)


def test_plain_and_speculative_are_identical(toy, opened):
    page = opened(f"{toy[0]}/#compare")
    page.get_by_label("Temperature").fill("0.8")
    set_number(page, "Seed", SEED)
    write(page)
    page.locator(".verdict.same").wait_for()
    texts = page.locator(".lane .text").all_text_contents()
    assert texts[0] == texts[1] == toy[1].generate(PROMPT, max_tokens=24, temperature=0.8, seed=SEED)[0].text
    assert f"All {len(texts[0])} characters" in page.locator(".verdict").inner_text()
    plain, speculative = page.locator(".lane").all()
    assert plain.locator(".accepted").count() == 0
    assert speculative.locator(".accepted").count() > 0
    assert not serious(page)


def test_texts_that_differ_are_called_different(toy, opened):
    page = opened(f"{toy[0]}/#compare")
    number = iter(range(2))

    def other(route):
        response = route.fetch()
        route.fulfill(response=response, body=response.text().replace('"text":"', f'"text":"{next(number)}', 3))

    page.route("**/v1/completions", other)
    write(page)
    page.locator(".verdict.other").wait_for()
    assert "part at character 1" in page.locator(".verdict").inner_text()


def test_a_lesson(toy, opened):
    page = opened(f"{toy[0]}/#lesson", color_scheme="dark")
    page.get_by_label("Temperature").fill("1")
    write_lesson(page)
    page.locator(".tries").first.wait_for()
    titles = page.locator(".part h2").all_inner_texts()
    assert [title.split("\n")[-1].split(":")[0].lstrip("12345") for title in titles] == [
        "Draft", "Verify", "Accept", "The classic rule", "With a tree",
    ]  # fmt: skip
    drawn = page.locator(".part").nth(2).locator("tr.drawn th").inner_text()
    assert drawn in page.locator(".part").nth(2).locator(".say").inner_text()
    assert "noise g" in page.locator(".part").nth(2).inner_text()
    assert "min(1, p/q)" in page.locator(".part").nth(3).inner_text()
    assert not serious(page)


def write_lesson(page):
    page.get_by_role("spinbutton", name="Tokens").fill("12")
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")


def test_a_phone(toy, opened):
    # Narrow from the start: what is drawn on a wide screen has its settings open, and a click would close them.
    page = opened(toy[0], is_mobile=True, has_touch=True, viewport={"width": 390, "height": 844})
    page.get_by_text("Settings").click()
    write(page, tokens=12)
    for view in ("Write", "Compare", "Lesson"):
        page.get_by_role("tab", name=view).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_label("Temperature").fill("0.7")
    set_number(page, "Seed", SEED)
    write_lesson(page)
    page.locator(".tries").first.wait_for()  # distributions, with noise: the widest tables
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not serious(page)
    page.get_by_role("tab", name="Compare").click()
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")
    page.locator(".verdict.same").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    times = [float(each.split()[0]) for each in page.locator(".time").all_inner_texts()]
    assert min(times) > 0  # by the server's clock, however late the browser reads


def test_light_and_dark(toy, opened):
    page = opened(toy[0], color_scheme="dark")
    look = "getComputedStyle(document.body).backgroundColor"
    page.locator(".hello").wait_for()
    dark = page.evaluate(look)
    page.get_by_role("button", name="Switch to light colours").click()
    page.get_by_role("button", name="Switch to dark colours").wait_for()
    assert page.evaluate(look) != dark
    page.reload()
    page.get_by_role("button", name="Switch to dark colours").click()
    assert page.evaluate(look) == dark


def test_a_conversation_behind_a_key(chat, opened):
    page = opened(chat, expects=("401",))
    assert "API key" in page.get_by_role("alert").inner_text()
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").blur()
    write(page, "def add(a, b):", tokens=8)
    write(page, "for row in rows:", tokens=8)
    page.locator(".turn").nth(1).locator(".facts").wait_for()
    assert page.locator(".plot canvas").count() == 5
    told = page.locator(".turn .asked").all_inner_texts()
    assert [each.split("You:")[-1].strip() for each in told] == ["def add(a, b):", "for row in rows:"]


def test_what_goes_wrong_is_said(toy, opened):
    page = opened(toy[0], expects=("429", "400", "ERR_"))
    busy = {"error": {"message": "9 requests run already", "type": "rate_limit_error", "param": None, "code": None}}
    page.route("**/v1/completions", lambda route: route.fulfill(status=429, json=busy, headers={"Retry-After": "1"}))
    page.get_by_role("spinbutton", name="Tokens").fill("8")
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")
    assert "9 requests run already" in page.get_by_role("alert").inner_text()
    page.unroute("**/v1/completions")
    page.get_by_role("button", name="Try again").click()
    page.locator(".facts").wait_for()
    page.route("**/v1/completions", lambda route: route.abort())
    page.get_by_role("button", name="Write it again").click()
    assert "does not answer" in page.get_by_role("alert").inner_text()
    assert not serious(page)
