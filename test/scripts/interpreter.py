"""interpreter.py -- continues a test in a Python that has the modules that it needs."""
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def choose(*wanted, also=()):
    """continues in the first Python that imports the first of these lists of modules that any of them has: that of
    PYTORCH_PYTHON, or else this one, that of build/pytorch, the system's or one of `also`"""
    if "CABLE_PYTHON_CHOSEN" in os.environ:
        return
    candidates = [sys.executable, os.path.join(ROOT, "build", "pytorch", "bin", "python"), "/usr/bin/python3", *also]
    if os.environ.get("PYTORCH_PYTHON"):
        candidates = [os.environ["PYTORCH_PYTHON"]]
    for modules in wanted:
        for python in candidates:
            try:
                found = subprocess.run([python, "-c", "import " + modules], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL).returncode == 0
            except OSError:
                continue
            if found:
                os.environ["CABLE_PYTHON_CHOSEN"] = python
                sys.stdout.flush()
                os.execv(python, [python, *sys.argv])
