"""utils.py may be imported anywhere."""
import sys
from pathlib import Path

from launch import ROOT, Job


def test_importing_utils_leaves_ctrl_c_to_a_notebook_and_works_in_a_thread():
    Path("notebook.py").write_text("""import signal, threading
thread = threading.Thread(target=__import__, args=["utils"])
thread.start()
thread.join()
print(signal.getsignal(signal.SIGINT).__name__)
""")
    job = Job([sys.executable, "notebook.py"], PYTHONPATH=str(ROOT))
    assert job.wait() == 0 and (job.stdout, job.stderr) == ("default_int_handler\n", "")
