"""All generated pages, as JSON: `python -m docs.generate.pages`.

pages    path -> Markdown, for the site
plain    path -> Markdown that needs no site, where that is another
"""

import json

from docs.generate import api_page, api_text, commands_page, config_page, metrics_page, proto_page


def made() -> dict[str, str]:
    links = config_page.anchors()
    return {
        "reference/config.md": config_page.page(),
        "reference/commands.md": commands_page.page(links),
        "reference/metrics.md": metrics_page.page(links),
        "reference/proto.md": proto_page.page(),
        "reference/api.md": api_page.page(),
    }


if __name__ == "__main__":
    print(json.dumps({"pages": made(), "plain": {"reference/api.md": api_text.page()}}))
