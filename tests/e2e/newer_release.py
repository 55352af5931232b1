"""Run `penstock` as a release whose envelope version is one higher. The arguments are its own."""

from __future__ import annotations

import sys

from penstock import model

model.CODEC_VERSION += 1
model.EVENT_TYPE = f"penstock.request.v{model.CODEC_VERSION}"

if __name__ == "__main__":
    from penstock.cli.main import main

    sys.exit(main())
