"""A real dataset that is not there yet is fetched by one process of a machine, while the others wait."""
import gzip
import hashlib
import http.server
import threading

from launch import figures, run


def test_one_process_fetches_a_missing_dataset_for_all(tmp_path, customize, fashion_mnist):
    site = tmp_path / "site"
    site.mkdir()
    for file in (fashion_mnist(960, 101) / "FashionMNIST" / "raw").iterdir():
        (site / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    sums = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in site.iterdir()]
    fetched = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=site)

        def log_request(self, code="-", size="-"):
            if self.headers["Method"] != "HEAD":  # torchvision first looks where an address leads
                fetched.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    mirror = customize(f"""
import torchvision.datasets
torchvision.datasets.FashionMNIST.mirrors = ["http://127.0.0.1:{server.server_port}/"]
torchvision.datasets.FashionMNIST.resources = {sums}
""")
    jobs = [run(script, 1, "--dataset", "FashionMNIST", "--data-dir", script, cwd=tmp_path, **mirror)
            for script in ("multigpu_spawn.py", "multigpu_torchrun.py")]
    server.shutdown()
    assert figures(jobs[0]) == figures(jobs[1]) and 1 in figures(jobs[0])
    assert sorted(fetched) == sorted(2 * [f"/{name}" for name, _ in sums])
