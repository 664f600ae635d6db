"""download.py -- files from the network: resumed after a lost connection, checked against the publisher's size and sha256."""
import json
import os
import shutil
import time

from common import BadInput, Interrupted, Progress, human, need, say, sha256_of, sync_directory, writing

PARTIAL = ".partial"
TRIES = 8
TIMEOUT = (20, 60)                                      # seconds: connecting, waiting for data


def hub():
    """the hub that data sets come from; HF_ENDPOINT names a mirror, as for its own tools"""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def session():
    s = need("requests").Session()
    s.headers["User-Agent"] = "cable.c data scripts"
    if os.environ.get("HF_TOKEN"):                      # requests drops it when a redirect leaves the host
        s.hub_token = {"Authorization": "Bearer " + os.environ["HF_TOKEN"]}
    return s


def headers_for(s, url):
    return dict(getattr(s, "hub_token", {})) if url.startswith(hub() + "/") else {}


def pause(attempt):
    """1, 2, 4 ... 64 s; tests shorten it"""
    time.sleep(min(2 ** attempt, 64) * float(os.environ.get("DOWNLOAD_PAUSE", "1")))


def with_retries(what, action, arrived=lambda: 0):
    """action() until it succeeds; what is no passing trouble ends it at once. arrived(): bytes so far; tries that bring some
    are not counted"""
    requests = need("requests")
    attempt, before = 0, arrived()
    while attempt < TRIES:
        try:
            return action()
        except requests.HTTPError as e:
            status = e.response.status_code
            if status < 500 and status not in (408, 429):
                hint = {401: " (it may need an account: set HF_TOKEN)", 403: " (it may need an account: set HF_TOKEN)",
                        404: " (moved? get the file by other means and give --local)"}.get(status, "")
                raise BadInput(f"{what}: the server says {status}{hint}") from None
            trouble = f"the server says {status}"
        except (requests.RequestException, ConnectionError, TimeoutError) as e:
            trouble = ("no answer in time" if isinstance(e, (requests.Timeout, TimeoutError)) else
                       "connection lost" if arrived() else "no connection") + f" ({type(e).__name__})"
        if arrived() > before:
            attempt, before = 0, arrived()
        attempt += 1
        if attempt < TRIES:
            say(f"{what}: {trouble}; trying again, {attempt} of {TRIES - 1}")
            pause(attempt - 1)
    raise Interrupted(f"{what}: {trouble}, {TRIES} times; what arrived is kept")


def hub_files(repo, prefix="", ending=""):
    """[(path, size, sha256 or None)] of a data set on the hub, sorted"""
    s = session()
    url = f"{hub()}/api/datasets/{repo}/tree/main/{prefix}".rstrip("/") + "?recursive=true&limit=1000"
    found = []
    while url:
        def page():
            r = s.get(url, timeout=TIMEOUT, headers=headers_for(s, url))
            r.raise_for_status()
            return r
        r = with_retries(repo, page)
        try:
            entries = json.loads(r.content)
            for e in entries:
                if e["type"] == "file" and e["path"].endswith(ending):
                    found.append((e["path"], int(e.get("size", -1)), (e.get("lfs") or {}).get("oid")))
        except (ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{repo}: the hub's listing has another form than known ({e})") from None
        url = r.links.get("next", {}).get("url")
    if not found:
        raise BadInput(f"{repo}: no file {prefix}*{ending} on the hub")
    return sorted(found)


def hub_url(repo, path, kind="datasets/"):
    return f"{hub()}/{kind}{repo}/resolve/main/{path}"


def download(url, path, size=-1, sha256=None):
    """path, whole and checked; goes on with what an earlier try left beside it"""
    if os.path.exists(path):
        if size >= 0 and os.path.getsize(path) != size:
            raise BadInput(f"{path}: {os.path.getsize(path)} bytes, but its source has {size}: remove it to download it again")
        return path
    directory = os.path.dirname(path)
    partial = path + PARTIAL
    with writing(path):
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
    have = os.path.getsize(partial) if os.path.exists(partial) else 0
    if size >= 0 and free < size - have:
        raise BadInput(f"{path}: the disk is full: {human(size - have)} to come, {human(free)} free; another --cache")
    s = session()
    name = os.path.basename(path)
    with_retries(name, lambda: fetch(s, url, path, size), lambda: os.path.getsize(partial) if os.path.exists(partial) else 0)
    if size >= 0 and os.path.getsize(partial) != size:
        found = os.path.getsize(partial)
        os.remove(partial)
        raise BadInput(f"{name}: {found} bytes arrived, its source has {size}; removed, run the same command again")
    if sha256 and sha256_of(partial) != sha256:
        os.remove(partial)
        raise BadInput(f"{name}: the sha256 of what arrived is not {sha256[:12]}...; removed, run the same command again")
    with writing(path):
        os.replace(partial, path)
        sync_directory(directory)
    return path


def fetch(s, url, path, size):
    """one try, from where the partial file ends"""
    partial = path + PARTIAL
    have = os.path.getsize(partial) if os.path.exists(partial) else 0
    if 0 <= size < have:
        os.remove(partial)
        have = 0
    if have == size:
        return
    headers = {"Accept-Encoding": "identity", **headers_for(s, url)}
    if have:
        headers["Range"] = f"bytes={have}-"
    with s.get(url, headers=headers, stream=True, timeout=TIMEOUT) as r:
        if r.status_code == 416:                        # nothing behind what is there: the whole, or of another file
            total = r.headers.get("Content-Range", "").rpartition("/")[2]
            if total.isdigit() and int(total) == have:
                return
            os.remove(partial)
            raise ConnectionError("the partial file is of another version")
        r.raise_for_status()
        if have and (r.status_code != 206 or not r.headers.get("Content-Range", "").startswith(f"bytes {have}-")):
            have = 0                                    # the server sends all of it again
        length = r.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else size
        progress = Progress(max(total, 0), os.path.basename(path))
        try:
            with writing(path):
                f = open(partial, "r+b" if have else "wb")
            with f:
                f.seek(have)
                for block in r.iter_content(1 << 16):     # a lost connection loses at most this
                    with writing(path):
                        f.write(block)
                    have += len(block)
                    progress.update(have, 0)
                with writing(path):
                    f.truncate(have)
                    f.flush()
                    os.fsync(f.fileno())
        finally:
            progress.close()
    if 0 <= total != have:
        raise ConnectionError(f"connection lost after {have} of {total} bytes")


def hub_download(repo, entries, cache):
    """the entries of hub_files(), on disk"""
    paths = []
    for path, size, sha256 in entries:
        paths.append(download(hub_url(repo, path), os.path.join(cache, *path.split("/")), size, sha256))
    return paths


BERT_VOCAB = ("google-bert/bert-base-uncased", "vocab.txt", 231508,
              "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3")


def vocabulary(args):
    """where the tokenizer's files are: --tokenizer, --local if it has them, or downloaded; None: tiktoken gets GPT-2's itself"""
    if args.tokenizer:
        return args.tokenizer
    names = ("vocab.txt",) if args.encoding == "bert" else ("encoder.json", "vocab.json")
    if args.local and any(os.path.isfile(os.path.join(args.local, n)) for n in names):
        return args.local
    if args.encoding == "gpt2" or args.local:
        return None
    repo, name, size, sha256 = BERT_VOCAB
    cache = args.cache or os.path.join(args.out, "source")
    return os.path.dirname(download(hub_url(repo, name, kind=""), os.path.join(cache, "bert-base-uncased", name), size, sha256))
