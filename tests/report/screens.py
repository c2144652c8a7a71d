"""What the tests of the page in a browser share: screens, and a look at a canvas."""

SECONDS = 120.0  # for what Chromium does at once, on a busy machine
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 700}


def drawn(page, selector: str) -> int:
    """How many different colours a chart's canvas shows."""
    return page.eval_on_selector(
        f"{selector} canvas",
        """canvas => new Set(new Uint32Array(
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size""",
    )
