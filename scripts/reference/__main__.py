"""scripts/docs: gathers the pages in build/pages, then has MkDocs make the site in build/docs, strictly."""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from pages import ROOT, write

SITE, PAGES = ROOT / "build/docs", ROOT / "build/pages"


def serve(port: int) -> None:
    """What was built, for this machine alone, until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/ shows it; Ctrl-C ends that", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/docs", description="Build the documentation as a site in build/docs."
    )
    parser.add_argument("--serve", action="store_true", help="then show it on this machine")
    parser.add_argument(
        "--port", metavar="N", type=int, default=8000, help="where (default %(default)s; 0: any that is free)"
    )
    args = parser.parse_args(arguments)

    shutil.rmtree(PAGES, ignore_errors=True)
    write(PAGES)
    command = [sys.executable, "-m", "mkdocs", "build", "--clean", "--config-file", ROOT / "mkdocs.yml"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # what Material says of its future is in mkdocs.yml
    status = subprocess.run(command, env=environment, check=False).returncode
    if status == 0:
        print(f"{SITE.relative_to(ROOT)}/index.html")
        if args.serve:
            serve(args.port)
    return status


if __name__ == "__main__":
    sys.exit(main())
