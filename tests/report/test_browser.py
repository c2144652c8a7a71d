"""The report in headless Chromium: opened, clicked through, read by keyboard, on a phone, with hostile completions."""

import pathlib

import pytest

from scalerl_jax.report.page import write_report
from tests.report import run_folders
from tests.report.screens import PHONE, SECONDS, drawn

pytestmark = pytest.mark.slow

# Of the element with the focus: tag, id, class, and whether a ring can be seen around it.
FOCUSED = """() => {
    const one = document.activeElement;
    const style = getComputedStyle(one.matches('.choice input') ? one.nextElementSibling : one);
    const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    return [one.tagName, one.id, one.className, ring];
}"""
# The least contrast of a text's colour and of a line's with what is behind it (WCAG 2.2, relative luminance).
CONTRASTS = """() => {
    const style = getComputedStyle(document.documentElement);
    const luminance = (name) => {
        const [r, g, b] = style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/g)
            .map((part) => parseInt(part, 16) / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (one, other) => {
        const [light, dark] = [luminance(one), luminance(other)].sort((x, y) => y - x);
        return (light + 0.05) / (dark + 0.05);
    };
    const texts = ['--ink', '--muted', '--right', '--wrong', '--truncated', '--alarm', '--link'];
    const lines = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7', '--focus'];
    return [Math.min(...texts.flatMap((one) => [ratio(one, '--card'), ratio(one, '--paper')])),
            Math.min(...lines.map((one) => ratio(one, '--card')))];
}"""
# What sticks out on the right, but for what scrolls by itself.
TOO_WIDE = """() => [...document.querySelectorAll('main *')]
    .filter((one) => !one.closest('.scroll, .u-wrap, .hidden'))
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
    .map((one) => `${one.tagName}.${one.className}`)"""
TOO_SMALL = """() => [...document.querySelectorAll('button, select, summary, nav a')]
    .filter((one) => one.getBoundingClientRect().height < 24)
    .map((one) => one.outerHTML.slice(0, 80))"""


def test_it_opens_and_says_what_the_run_came_to(open_page):
    page = open_page("one")
    assert page.title() == "a <i>run - scalerl-jax" and page.inner_text("h1") == "a <i>run"
    assert [heading.inner_text() for heading in page.query_selector_all("h2")] == [
        "Pass rate against compute", "Health", "Who waited for whom", "Rollouts",
    ]  # fmt: skip
    tiles = dict(zip(page.locator(".tile dt").all_inner_texts(), page.locator(".figure").all_inner_texts()))
    last = run_folders.rate(0.3)
    assert float(tiles["Pass rate"]) == pytest.approx(last, abs=0.002)
    assert float(tiles["Forecast at half time"]) == pytest.approx(last, abs=0.1)  # made from seven evaluations
    assert tiles["Updates"] == "30" and tiles["Health"] == "1 alarm"
    assert page.locator("article.over h3").all_inner_texts() == ["Truncated"]
    assert page.locator(".alarms li").inner_text().startswith("a <i>run: 12% of the completions are cut by the token")
    assert "What to do: raise config.rollout.answer_budget" in page.locator(".alarms li").inner_text()
    plots = page.locator(".plot").count()
    assert plots == 1 + 1 + 19 + 2  # score, tasks, health, time
    for index in range(plots):
        assert page.locator(".plot canvas").nth(index).evaluate("canvas => canvas.width") > 100
    assert drawn(page, "#score .plot") > 20 and drawn(page, "#time .plot") > 5
    assert page.locator("canvas:not([aria-hidden=true])").count() == 0
    assert all(label for label in page.locator(".plot").evaluate_all("all => all.map(one => one.ariaLabel)"))


def test_each_environment_of_a_mixture_has_its_curve(open_page):
    page = open_page("mixture")
    assert "By environment: mixture" in page.locator("h3").all_inner_texts()
    label = page.locator("#score .plot").first.get_attribute("aria-label")
    assert "mixture: 16 evaluations" in label and "another: 11 evaluations" in label
    page.get_by_role("radio", name="code").check()
    label = page.locator("#score .plot").first.get_attribute("aria-label")
    assert "mixture: 16 evaluations" in label and "another" not in label  # which has no such environment
    assert drawn(page, "#score .plot") > 20
    page.get_by_role("radio", name="All").check()
    assert "another" in page.locator("#score .plot").first.get_attribute("aria-label")


def test_axes_fits_and_tables(open_page):
    page = open_page("one")
    before = drawn(page, "#score .plot")
    rest = page.locator("#score .readout").first
    assert rest.inner_text().startswith("typical device-hours")
    page.get_by_role("radio", name="Device-hours", exact=True).check()
    assert rest.inner_text().startswith("device-hours")
    page.get_by_role("radio", name="Log").check()
    assert "no place on a log axis" in rest.inner_text() and drawn(page, "#score .plot") > 20
    page.get_by_label("on all evaluations").uncheck()
    page.get_by_label("on the first half").uncheck()
    assert drawn(page, "#score .plot") < before
    page.get_by_role("radio", name="Updates").check()
    assert drawn(page, "#score .plot") > 5
    page.locator("#score summary").first.click()
    page.locator("#score table").first.locator("tbody tr").nth(15).wait_for()  # it is made as it opens
    rows = page.locator("#score table").first.locator("tbody tr").all_inner_texts()
    assert len(rows) == 16
    cells = rows[-1].split("\t")
    assert [cells[1], cells[6]] == ["30", "100 × 8"] and float(cells[4]) == pytest.approx(
        run_folders.rate(0.3), abs=0.002
    )
    # Under the pointer stand the evaluation nearest to it and the fit there.
    page.get_by_role("radio", name="Device-hours", exact=True).check()
    page.get_by_role("radio", name="Linear").check()
    page.get_by_label("on all evaluations").check()
    box = page.locator("#score .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 100)
    assert rest.inner_text().startswith("update 18, 0.18 device-hours: ")
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 100)
    assert "forecast 0." in rest.inner_text()


def test_filters_steps_and_shading(open_page):
    page = open_page("one")
    count, verdict = page.locator(".count"), page.locator(".one .verdict").first
    assert count.inner_text() == "1 of 48"
    # Of each update's eight: two hostile ones, which are right, and groups 0 to 5; 4 is cut, 0 and 3 are interrupted.
    for name, number, word in (("Right", 4, "Right"), ("Wrong", 3, "Wrong"), ("Truncated", 1, "Truncated")):
        page.locator(".filters").get_by_text(name).click()
        assert count.inner_text().endswith(f" of {6 * number}") and verdict.inner_text().endswith(word)
        assert page.locator(".filters [aria-pressed=true] .number").inner_text() == str(6 * number)
    page.locator(".filters").get_by_text("Interrupted").click()
    assert count.inner_text().endswith(" of 12")
    assert page.locator(".forced .tag").inner_text() == "interrupted"
    assert page.locator(".forced").inner_text().endswith("1+1")
    page.select_option("#reader-step", "20")
    assert count.inner_text().endswith(" of 2") and page.locator(".map .step").all_inner_texts() == ["20"]
    page.locator(".filters").get_by_text("All", exact=True).click()
    assert count.inner_text().endswith(" of 8")
    assert page.locator(".block h4").all_inner_texts() == ["Prompt", "Thinking", "Answer"]
    assert page.locator(".block .text").first.text_content() == "0+1="
    spans = page.locator(".block .t")
    assert "".join(spans.all_text_contents()) == "<think>1+1=2</think>2"
    assert page.locator(".version").all_inner_texts() == ["v17", "v18", "v19"]
    # The less likely, the higher its class; forced tokens have none.
    classes = [set(one.split()) for one in spans.evaluate_all("all => all.map(one => one.className)")]
    levels = [next((int(name[1:]) for name in names if name[0] == "p"), None) for names in classes]
    assert levels[7:10] == [None] * 3 and levels[0] == 0 and levels[:7] == sorted(levels[:7]) and levels[6] > 5
    page.get_by_role("radio", name="Version").check()
    assert page.locator(".block .w1").count() == 4 and page.locator(".block .p6").count() == 0
    spans.nth(3).hover()
    assert page.inner_text(".token").split("  ·  ")[:3] == ['"i"', "token 3", "log-prob −1.200"]
    assert page.inner_text(".token").endswith("version 18, staleness 1")


def test_hostile_completions_are_text(open_page):
    page = open_page("one")
    elements = page.locator("*").count()
    for group, whole in ((50, run_folders.HOSTILE), (51, run_folders.HOSTILE + "<b>1")):
        page.locator(f'.square[aria-label^="update 5, group {group}:"]').click()
        codes = page.locator(".block .t").evaluate_all(
            "all => all.flatMap(one => [...Array(one.textContent.length)].map((_, i) => one.textContent.charCodeAt(i)))"
        )
        assert codes == [ord(letter) for letter in whole]
        prompt = page.locator(".block .text").first
        assert (
            prompt.evaluate("one => one.textContent.length") == len(run_folders.HOSTILE)
            and prompt.locator("*").count() == 0
        )
    assert page.locator("script").count() == 3 and page.locator("img, iframe, object, main svg, b, i").count() == 0
    assert page.locator(".what", has_text="nothing is shaded").count() == 1
    assert elements > 500


def test_everything_is_reached_and_moved_by_keys(open_page):
    page = open_page("one")
    stops = []
    for _ in range(200):
        page.keyboard.press("Tab")
        stops.append(page.evaluate(FOCUSED))
        if stops[-1][0] == "BODY":
            break
    assert stops[-1][0] == "BODY" and all(ring for tag, _, _, ring in stops if tag != "BODY")
    names = [" ".join(stop[:3]) for stop in stops]
    assert names[0].endswith("skip") and "BUTTON theme " in names
    for needed in ("INPUT  ", "DIV  plot", "SUMMARY  ", "SELECT reader-step ", "BUTTON  turn", "DIV  text"):
        assert any(name.startswith(needed) for name in names), needed
    assert sum("square" in name for name in names) == 1  # one stop for all of them

    page.locator("#score .plot").first.focus()
    for key, said in (("End", "update 30, 0.3 device-hours"), ("ArrowLeft", "update 28,"), ("Home", "update 0,")):
        page.keyboard.press(key)
        assert page.locator("#score .readout").first.inner_text().startswith(said)
    page.keyboard.press("Escape")
    assert page.locator("#score .readout").first.inner_text().startswith("typical device-hours; ")

    page.locator(".square[tabindex='0']").focus()
    for key, at in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowDown", 10),
        ("ArrowLeft", 9),
        ("End", 47),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        focused = page.evaluate("[document.activeElement.dataset.at, document.activeElement.ariaChecked]")
        assert focused == [str(at), "true"] and page.inner_text(".count") == f"{at + 1} of 48"
    page.get_by_text("Next →").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text(".count") == "3 of 48"
    page.locator(".block .text").nth(1).focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.inner_text(".token").startswith('"h"  ·  token 2') and page.inner_text(".count") == "3 of 48"


def test_light_and_dark(open_page):
    backgrounds = {}
    for scheme in ("light", "dark"):
        page = open_page("one", color_scheme=scheme)
        colours = []
        for _ in range(4):
            colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            ratios = page.evaluate(CONTRASTS)
            assert ratios[0] >= 4.5 and ratios[1] >= 3, (scheme, len(colours), ratios)  # WCAG 2.2: text, graphics
            page.click("#theme")
        backgrounds[scheme] = colours
    light, dark = backgrounds["light"][0], backgrounds["dark"][0]
    assert light != dark
    assert backgrounds == {"light": [light, light, dark, light], "dark": [dark, light, dark, dark]}


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_phone_scrolls_down_only(open_page, name):
    page = open_page(name, viewport=PHONE, has_touch=True, is_mobile=True)
    for details in page.locator("summary").all():
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    wide = page.evaluate(TOO_WIDE)
    assert wide == []
    small = page.evaluate(TOO_SMALL)
    assert small == []
    widths = page.locator("#score .u-wrap").first.evaluate("one => [one.clientWidth, one.closest('.plot').clientWidth]")
    assert 250 < widths[0] <= widths[1]
    page.set_viewport_size({"width": 700, "height": 375})
    page.wait_for_function("document.querySelector('#score .u-wrap').clientWidth > 500")


def test_several_runs_beside_each_other(open_page):
    page = open_page("two")
    assert page.inner_text("h1") == "2 runs"
    rows = [row.split("\t") for row in page.locator("#compare tbody tr").all_inner_texts()]
    assert [row[0].strip() for row in rows] == ["a <i>run", "another"]
    assert [float(row[3].split()[0]) for row in rows] == pytest.approx([0.9, 0.7], abs=0.02)
    assert page.locator("#score .legend").first.locator("li").all_inner_texts() == ["a <i>run", "another"]
    assert page.locator("#health article").count() == 19
    page.select_option("#reader-run", "1")
    assert page.locator(".count").inner_text() == "1 of 32"
    page.select_option("#time-run", "1")
    assert drawn(page, "#time .plot") > 5


def test_error_bars_stay_inside_the_axes(open_page):
    """Every bar of the score's chart ends within its y range, which a pass rate's own range bounds."""
    page = open_page("one")
    box = page.locator("#score .u-over").first.bounding_box()
    canvas = page.locator("#score .plot canvas").first
    # Above and below the plotting area, where only the axis' numbers stand on the left, nothing is drawn in ink.
    drawn = canvas.evaluate(
        """(canvas, [left, top, height]) => {
            const ratio = canvas.width / canvas.getBoundingClientRect().width;
            const at = canvas.getBoundingClientRect();
            const first = Math.ceil((left - at.left) * ratio) + 1;
            const above = Math.floor((top - at.top) * ratio) - 1;
            const context = canvas.getContext('2d');
            const pixels = context.getImageData(first, 0, canvas.width - first, Math.max(1, above)).data;
            return pixels.filter((value, index) => index % 4 === 3 && value > 40).length;
        }""",
        [box["x"], box["y"], box["height"]],
    )
    assert drawn == 0


def test_a_warm_start_has_its_loss_and_no_rollouts(browser, tmp_path):
    page = browser.new_page()
    page.set_default_timeout(1000 * SECONDS)
    page.goto(pathlib.Path(write_report([run_folders.write_warm_start(tmp_path / "warm")])).as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    tiles = dict(zip(page.locator(".tile dt").all_inner_texts(), page.locator(".figure").all_inner_texts()))
    assert tiles["Loss"] == "1.000" and tiles["Updates"] == "60"
    assert page.locator("h2").all_inner_texts() == ["Health"]
    assert page.locator("article h3").all_inner_texts() == ["Loss", "Gradient norm"]
    # The held-out loss is in every other row only: its line goes from the first evaluation to the last all the same.
    card = page.locator("article").first
    box = card.locator(".u-over").bounding_box()
    columns = card.locator("canvas").evaluate(
        """(canvas, box) => {
            const at = canvas.getBoundingClientRect();
            const ratio = canvas.width / at.width;
            const [left, top] = [(box.x - at.left) * ratio, (box.y - at.top) * ratio].map(Math.ceil);
            const [width, height] = [box.width * ratio, box.height * ratio].map(Math.floor);
            const pixels = canvas.getContext('2d').getImageData(left, top, width, height).data;
            const soft = getComputedStyle(document.documentElement).getPropertyValue('--soft').trim();
            const wanted = [1, 3, 5].map((at) => parseInt(soft.slice(at, at + 2), 16));
            const found = new Set();
            for (let at = 0; at < pixels.length; at += 4) {
                const near = wanted.every((value, channel) => Math.abs(value - pixels[at + channel]) < 16);
                if (near && pixels[at + 3] > 100) found.add(Math.floor((((at / 4) % width) / width) * 20));
            }
            return [...found].sort((one, other) => one - other);
        }""",
        box,
    )
    assert columns == list(range(columns[0], columns[-1] + 1)) and len(columns) >= 18
    page.close()
