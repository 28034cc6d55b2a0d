"""What test modules share. A test module imports no other test module: what two of them need lies here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The folder of the repository."""
HANG_S = 600.0
"""What has not ended by then hangs; no machine is that slow at anything that a test asks for."""
