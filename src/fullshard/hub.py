"""The Hugging Face Hub, asked once: is it there, and does it have this?"""

from __future__ import annotations

from fullshard.errors import UserError, first_line

HUB_TIMEOUT = 10  # Seconds.


def ask_hub(name: str, *, repo_type: str, key: str, revision: str | None = None) -> bool:
    """Whether the Hub answers; UserError when it does and has no such repository. Asked once: the libraries retry for up to 47 s."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=repo_type, revision=revision, timeout=HUB_TIMEOUT)
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(f"{key}: {name}: not found; no such path here, and the Hub says: {first_line(error)}") from error
    except Exception:  # Connection errors have no common base: OSError, the HTTP client's own, offline mode.
        return False
    return True
