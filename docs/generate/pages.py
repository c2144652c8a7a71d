"""All generated pages, as JSON of path -> Markdown: `python -m docs.generate.pages`."""

import json

from docs.generate import api_page, commands_page, config_page, metrics_page, proto_page


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
    print(json.dumps(made()))
