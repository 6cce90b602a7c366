"""A real dataset that is not there yet is fetched by one process, while others wait or do the same."""
import gzip
import hashlib
import http.server
import threading

from launch import figures, run_all


def test_two_jobs_fetch_a_missing_dataset_into_one_folder_by_one_process_each(tmp_path, customize, fashion_mnist):
    site = tmp_path / "site"
    site.mkdir()
    for file in (fashion_mnist(960, 101) / "FashionMNIST" / "raw").iterdir():
        (site / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    sums = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in site.iterdir()]
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=site)

        def log_request(self, code="-", size="-"):
            asked.append((self.command, self.path))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    mirror = customize(f"""
import torchvision.datasets
torchvision.datasets.FashionMNIST.mirrors = ["http://127.0.0.1:{server.server_port}/"]
torchvision.datasets.FashionMNIST.resources = {sums}
""")
    jobs = run_all(*[(script, 1, "--dataset", "FashionMNIST", dict(cwd=tmp_path, **mirror))
                     for script in ("multigpu_spawn.py", "multigpu_torchrun.py")])
    server.shutdown()
    assert figures(jobs[0]) == figures(jobs[1]) and 1 in figures(jobs[0])
    fetched = [path for method, path in asked if method == "GET"]
    assert all(1 <= fetched.count(f"/{name}") <= 2 for name, _ in sums)  # once a job, where both found none
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["FashionMNIST"]  # nothing beside
