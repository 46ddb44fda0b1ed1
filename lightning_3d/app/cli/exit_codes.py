"""Run a command to its exit code: one message for what the user can repair, a traceback for
everything else."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from lightning_3d.errors import Lightning3DError, is_full


def guarded(
    action: Callable[[], int], *, shown: tuple[type[Exception], ...] = (), silent: bool = False
) -> int:
    """Run a command and return its exit code.

    Args:
        shown: errors whose text is enough: exit code 1 without a traceback.
        silent: print no message, because another rank prints it.
    """
    try:
        code = action()
        # flush here, where a closed pipe raises BrokenPipeError; at exit Python would only print a
        # complaint
        sys.stdout.flush()
        return code
    except Lightning3DError as error:
        if not silent:
            print(f"lightning_3d: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:
        # Lightning's Trainer ends the process with 1 then
        if isinstance(end.__context__, KeyboardInterrupt):
            return 128 + signal.SIGINT
        raise
    except BrokenPipeError:
        # `| head`; Python would complain again when it flushes standard output at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        from lightning_3d.app.config.explain import explain, is_composition_error

        if is_composition_error(error):  # some are OSErrors
            if not silent:
                print(f"lightning_3d: {explain(error)}", file=sys.stderr)
            return Lightning3DError.exit_code
        if is_full(error) or isinstance(error, shown):
            # a full disk affects all ranks; any other error may affect only this one
            if not (silent and is_full(error)):
                print(f"lightning_3d: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
