"""Settings of the whole suite."""

import signal

# A shell that runs the suite in the background has its processes ignore Ctrl-C, and theirs too: some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
