"""The page in a real browser: what is typed, slid and compared is drawn, and hostile texts stay texts."""

import json
import shutil
import time

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import server_helpers
import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("chromedriver"), reason="needs chromium and chromium-driver"),
]
LABELS = ["<b id=hacked>cash</b>", "\u202elost card", "transfer"]
TEXT, OTHER = "where is my card", "please pay my money back not cash"
HOSTILE = {
    "image": "<img src=x onerror=\"document.title='hacked'\">",
    "script": "<script>document.title='hacked'</script>",
    "attribute": "\"'><svg onload=\"document.title='hacked'\">",
    "template": "{{constructor.constructor('document.title=1')()}} ${document.title=1}",
    "frame": "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe>",
    "style": "</textarea><style>*{display:none}</style>",
    "link": "javascript:document.title='hacked'",
    "entities": "&lt;b&gt; &#x202e; &amp;amp;",
    "override": "safe \u202e gpj.exe \u2066 hidden",
    "arabic": "أين بطاقتي؟ لقد فقدتها أمس",
    "hebrew": "איפה הכרטיס שלי",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f card",
    "escape": "\x1b[2J\x1b]0;hacked\x07 card",
    "zero width": "c\u200ba\u200cr\u200dd\ufeff",
    "combining": "c" + "\u0301" * 5000,
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈" * 500,
    "surrogate": "card \ud800",
    "separators": "card\u2028money\u2029\r\n\u0085back",
    "words": "card " * 200_000,
    "one word": "a" * 1_000_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tiny.make_folder(tmp_path_factory.mktemp("page"), routed=True)
    config = json.loads((made / "config.json").read_text())
    config["id2label"] = {str(i): name for i, name in enumerate(LABELS)}
    config["label2id"] = {name: i for i, name in enumerate(LABELS)}
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def address(folder):
    with server_helpers.process(folder) as (_, found):
        yield found


@pytest.fixture(scope="module")
def engine(folder):
    return server_helpers.load(folder)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, browser, address, *, width=1280, scheme="light"):
        self.browser = browser
        self.look(width, scheme)
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(address)
        self.until(lambda: self.all("textarea") or not self.one("#key").get_attribute("hidden"))

    def look(self, width, scheme="light"):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def one(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def script(self, code, *arguments):
        return self.browser.execute_script(code, *arguments)

    def until(self, holds, seconds=60):
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.script("return document.body.innerText.slice(0, 500)")
            time.sleep(0.02)

    def settle(self):
        """Until what was asked for is drawn."""
        self.until(lambda: not self.all(".result[aria-busy=true]"))

    def type(self, text, place=0):
        self.all("textarea")[place].send_keys(text)
        self.settle()

    def paste(self, text):
        code = "const a = arguments[0]; a.value = JSON.parse(arguments[1]); a.dispatchEvent(new Event('input'))"
        self.script(code, self.one("textarea"), json.dumps(text))
        self.settle()

    def units(self, place=0):
        """Which units are lit, layer by layer."""
        code = "return [...arguments[0].querySelectorAll('.unit')].map(e => Number(e.className.trim() !== 'unit'))"
        lit = self.script(code, self.all(".result")[place])
        return [lit[at : at + 5] for at in range(0, len(lit), 5)]

    def complaints(self):
        """What the console says, but for answers that the page shows as messages."""
        said = [entry["message"] for entry in self.browser.get_log("browser")]
        return [line for line in said if "the server responded with a status of 4" not in line]

    @property
    def overflow(self):
        return self.script("return document.documentElement.scrollWidth - innerWidth")


def test_a_text_lights_up_what_ran_for_it(browser, address, engine):
    page = Page(browser, address)
    assert page.one("#share").text == "\N{EN DASH}"
    page.type(TEXT)
    expected = engine.predict([TEXT])
    assert page.units() == expected.output.gates[0].tolist()
    assert page.one(".classes .best .name").text == expected.labels[0]
    assert page.one(".classes .best .value").text.startswith(f"{100 * expected.probabilities.max():.0f}")
    assert page.one("#share").text == f"{100 * expected.head_share[0]:.0f} %"
    assert page.one(".figure.units dd").text == f"{int(expected.output.gates.sum())} of 15"
    assert page.one(".figure.time dd").text.endswith(" ms")
    assert page.one("#own").get_attribute("aria-pressed") == "true"
    assert page.complaints() == []


def test_the_slider_runs_it_again_with_the_keyboard_alone(browser, address, engine):
    page = Page(browser, address)
    page.type(TEXT)
    page.one("textarea").send_keys(Keys.TAB)
    slider = browser.switch_to.active_element
    assert slider.get_attribute("id") == "budget"
    slider.send_keys(Keys.END)
    page.until(lambda: page.units() == [[1] * 5] * 3)
    assert page.one("#share").text == "100 %"
    assert page.one("#own").get_attribute("aria-pressed") == "false"
    slider.send_keys(Keys.HOME)
    page.until(lambda: sum(map(sum, page.units())) == 3)
    assert slider.get_attribute("aria-valuetext") == "5.0\N{NO-BREAK SPACE}%"
    for _ in range(30):
        slider.send_keys(Keys.ARROW_RIGHT)
    page.settle()
    assert page.units() == engine.predict([TEXT], budget=0.35).output.gates[0].tolist()
    slider.send_keys(Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: page.units() == engine.predict([TEXT]).output.gates[0].tolist())


def test_two_texts_are_compared(browser, address, engine):
    page = Page(browser, address)
    page.type(TEXT)
    page.one("#compare").click()
    page.type(OTHER, 1)
    one, two = engine.predict([TEXT, OTHER]).output.gates
    assert [page.units(0), page.units(1)] == [one.tolist(), two.tolist()]
    both = int((one & two).sum())
    said = page.one("#common").text
    assert said.startswith(f"{both} ran for both texts, {one.sum() - both} for the first alone, {two.sum() - both} for")
    assert len(page.all(".unit.only")) == one.sum() + two.sum() - 2 * both
    page.one("#compare").click()
    assert len(page.all("textarea")) == 1
    assert not page.all(".unit.only")


@pytest.mark.parametrize("width", [380, 320, 1280])
def test_nothing_is_cut_off_in_a_window_of_any_width(browser, address, width):
    page = Page(browser, address, width=width)
    page.type(TEXT)
    page.one("#compare").click()
    page.type(OTHER, 1)
    assert page.overflow <= 0
    parts = "#controls > *, .result, .unit, .figure"
    code = """return [...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect())
        .filter(r => r.left < 0 || r.right > innerWidth || r.width < 4).length"""
    assert page.script(code, parts) == 0


def test_it_is_light_and_dark(browser, address):
    page = Page(browser, address)
    colours = set()
    for scheme in ("light", "dark"):
        page.look(1280, scheme)
        colours.add(page.script("return getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


def test_a_key_is_asked_for(browser, folder):
    with server_helpers.process(folder, BUDGETFORMER_API_KEY="right") as (_, address):
        page = Page(browser, address)
        for key in ("wrong", "right"):
            page.until(lambda: page.one("#secret").is_displayed())
            page.one("#secret").clear()
            page.one("#secret").send_keys(key, Keys.ENTER)
            time.sleep(0.3)
        page.until(lambda: page.all("textarea"))
        page.type(TEXT)
        assert page.all(".unit.on")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_stays_a_text(browser, address, name):
    page = Page(browser, address, width=380)
    before = page.script("return document.querySelectorAll('*').length")
    title = browser.title
    page.type(TEXT)
    drawn = page.script("return document.querySelectorAll('*').length")
    page.paste(HOSTILE[name])
    note = page.one(".note")
    if name == "surrogate":
        assert "no JSON" in note.text
        assert "alarm" in note.get_attribute("class")
    else:
        assert "tokens" in note.text, note.text
    assert page.script("return document.querySelectorAll('*').length") == drawn > before
    assert browser.title == title
    assert not page.all("#hacked, img, iframe, textarea svg")
    assert page.overflow <= 0
    assert page.complaints() == []
