"""``python -m tangent_lens`` is ``tangent-lens``."""

from tangent_lens.cli import main

if __name__ == "__main__":
    main()
