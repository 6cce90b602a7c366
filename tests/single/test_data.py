"""A real dataset that is not there yet is fetched by one process of a machine, while the others wait."""
import gzip
import hashlib
import http.server
import threading

import pytest
from forked import train
from launch import figures


@pytest.mark.parametrize("script", ["multigpu_spawn.py", "multigpu_torchrun.py"])
def test_one_process_fetches_a_missing_dataset_for_all(script, tmp_path, fashion_mnist):
    site, fetched = tmp_path / "site", []
    site.mkdir()
    for file in (fashion_mnist(960, 101) / "FashionMNIST" / "raw").iterdir():
        (site / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    sums = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in site.iterdir()]

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=site)

        def log_request(self, code="-", size="-"):
            if self.headers["Method"] != "HEAD":  # torchvision first looks where an address leads
                fetched.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    job = train(script, 1, "--dataset", "FashionMNIST", cwd=tmp_path, before=f"""
import torchvision.datasets
torchvision.datasets.FashionMNIST.mirrors = ["http://127.0.0.1:{server.server_port}/"]
torchvision.datasets.FashionMNIST.resources = {sums}
""")
    server.shutdown()
    assert list(figures(job.stdout)) == [1]
    assert sorted(fetched) == sorted(f"/{name}" for name, _ in sums)
