"""encoding.py -- text to token ids on all cores: byte-pair encoding, GPT-2's (tiktoken) or a tokenizer.json's with
GPT-2's split into words (tokenizers), and WordPiece, BERT's or a tokenizer.json's (tokenizers).

A document arrives in pieces (sources.py), cut only where no token can span the cut, so that the pieces encoded one by
one give the ids of the whole document. In a shard a document is framed as the trainer reads it: GPT-2 writes
<|endoftext|> before it, BERT writes [CLS] document [SEP].
"""
import contextlib
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from common import BadInput, console, hub_hint, need, open_regular, sha256_of

TASK_BYTES = 1 << 19                # text per task: large enough to hide its transfer, small enough to share out evenly
TASKS_PER_WORKER = 4                # tasks in flight, which bounds the memory

# The pattern by which GPT-2 cuts text into words before it pairs bytes; possessive, so that long runs take linear time.
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# what identifies a vocabulary: its size, the id that ends a document, and the sha256 of its table
VOCABULARIES = {
    "gpt2": (50257, 50256, "3b27ee95684e28911415c6bcd8537b0d5b950f05a84053d4e6c63a26990f9617"),
    "bert": (30522, 102, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
}
CLS, SEP, EOT = 101, 102, 50256


def byte_characters():
    """{character: byte}: GPT-2 writes a printable byte as itself and any other as a character from U+0100 on"""
    table, spare = {}, 256
    for b in range(256):
        if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255:
            table[chr(b)] = b
        else:
            table[chr(spare)] = b
            spare += 1
    return table


def first_file(directory, names):
    for name in names:
        if os.path.isfile(os.path.join(directory, name)):
            return os.path.join(directory, name)
    return None


def check_directory(directory, *files):
    """raises BadInput unless a tokenizer's directory is here; files: their names on the hub, for the hint"""
    snapshots = glob.glob(os.path.join(glob.escape(directory), "snapshots", "*", ""))
    snapshots += glob.glob(os.path.join(glob.escape(directory), "models--*", "snapshots", "*", ""))
    if snapshots:
        raise BadInput(f"{directory}: a cache of the hub, whose files are below {snapshots[-1]}; name that directory")
    if not os.path.exists(directory):
        raise BadInput(f"{directory}: no such directory{hub_hint(directory, *files)}")


def gpt2_ranks(directory):
    """{bytes of a token: id} from encoder.json and vocab.bpe (or vocab.json and merges.txt), which must agree and be
    GPT-2's"""
    check_directory(directory, "vocab.json", "merges.txt")
    vocab = first_file(directory, ("encoder.json", "vocab.json"))
    merges = first_file(directory, ("vocab.bpe", "merges.txt"))
    if vocab is None or merges is None:
        raise BadInput(f"{directory}: expected GPT-2's encoder.json and vocab.bpe (or vocab.json and merges.txt) there")
    table, letters = console.read_object(vocab), byte_characters()
    try:
        ranks = {bytes(letters[c] for c in token): rank for token, rank in table.items() if rank != EOT}
        check_ranks(ranks)
        with open_regular(merges) as f:
            pairs = [line for line in f.read().decode("utf-8").split("\n") if line and not line.startswith("#version")]
        if [table.get("".join(pair.split(" ", 1))) for pair in pairs] != list(range(256, EOT)):
            raise ValueError("other merges")
    except (ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{vocab}, {merges}: an unknown vocabulary, not GPT-2's ({e})") from None
    return ranks


def check_ranks(ranks):
    h = hashlib.sha256()
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        h.update(len(token).to_bytes(2, "little") + token)
    if sorted(ranks.values()) != list(range(EOT)) or h.hexdigest() != VOCABULARIES["gpt2"][2]:
        raise ValueError("other tokens")


class GPT2:
    """GPT-2's byte-pair encoding; '<|endoftext|>' inside a text is plain text"""
    name = "gpt2"
    header = (0, 0)                 # vocabulary and end-of-text id, as the header of a shard states them
    frame = ([EOT], [])             # ids before and after a document

    def __init__(self, directory=None):
        tiktoken = need("tiktoken")
        if directory:
            ranks = gpt2_ranks(directory)
            self.encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_WORDS, mergeable_ranks=ranks,
                                              special_tokens={"<|endoftext|>": EOT})
        else:
            try:
                self.encoding = tiktoken.get_encoding("gpt2")
                check_ranks({self.encoding.decode_single_token_bytes(i): i for i in range(EOT)})
            except Exception as e:  # tiktoken downloads its tables with requests, which has many kinds of errors
                raise BadInput(f"tiktoken cannot download GPT-2's vocabulary ({type(e).__name__}: {e}); "
                               "give --tokenizer DIR with encoder.json and vocab.bpe") from None
        self.sha256 = VOCABULARIES["gpt2"][2]

    def encode(self, texts):
        """one uint16 array per text"""
        return [self.encoding.encode_to_numpy(t, disallowed_special=()).astype("u2") for t in texts]

    def decode(self, ids):
        return self.encoding.decode_bytes([int(i) for i in ids]).decode("utf-8", "replace")


@contextlib.contextmanager
def silent_stderr():
    """nothing reaches stderr: tokenizers, which is written in Rust, prints a backtrace before it raises"""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def tokenizer_of(text, path, plain):
    """The tokenizer that a tokenizer.json describes; a file may ask to cut texts or to fill them up, which is undone.
    plain: special tokens that a text spells are plain text."""
    tokenizers = need("tokenizers")
    if not hasattr(tokenizers.Tokenizer, "encode_batch_fast"):
        raise BadInput(f"expected tokenizers 0.21 or later, got {tokenizers.__version__}: pip install -r "
                       "data/requirements.txt")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"          # several processes share the work already
    try:
        with silent_stderr():
            made = tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as e:      # it raises a plain Exception, or for damage PanicException, a BaseException
        why = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise BadInput(f"{path}: expected a tokenizer.json, but Python's tokenizers cannot read it ({why})") from None
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = plain
    return made


def added_tokens(vocab, special, settings, more):
    """the added_tokens of a tokenizer.json: the special ones that the vocabulary has, and what the files beside it add,
    tokenizer_config.json's `settings` and added_tokens.json, {token: id}"""
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    found = {vocab[token]: {**entry, "content": token} for token in special if token in vocab}
    found.update((i, {**entry, "content": token, "special": False}) for token, i in more.items() if i not in found)
    for i, token in settings.get("added_tokens_decoder", {}).items():
        found[int(i)] = {**entry, **{key: token[key] for key in (*entry, "content") if key in token}}
    return [{"id": i, **found[i]} for i in sorted(found)]


def one_json(**parts):
    """the text of a tokenizer.json"""
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, **parts}, ensure_ascii=False, indent=1)


def bpe_json(vocab, merges, settings={}, more={}):
    """the tokenizer.json of a byte-level BPE, whose files are vocab.json and merges.txt"""
    by_bytes = {"type": "ByteLevel", "add_prefix_space": bool(settings.get("add_prefix_space", False)),
                "trim_offsets": True, "use_regex": True}
    table = console.read_object(vocab)
    lines = console.read_bytes(merges).decode("utf-8", "replace").split("\n")
    model = {"type": "BPE", "vocab": table, "merges": [s for s in lines if s and not s.startswith("#version")]}
    added = added_tokens(table, ["<|endoftext|>"], settings, more)
    return one_json(added_tokens=added, normalizer=None, pre_tokenizer=by_bytes, post_processor=None, decoder=by_bytes,
                    model=model)


def word_piece_json(vocab, settings={}, more={}):
    """the tokenizer.json of a WordPiece, whose file is vocab.txt"""
    lines = console.read_bytes(vocab).decode("utf-8", "replace").removesuffix("\n").split("\n")
    table = {line.removesuffix("\r"): i for i, line in enumerate(lines)}
    if "[UNK]" not in table:
        raise BadInput(f"{vocab}: has no line [UNK], so it is not a WordPiece vocabulary")
    normalizer = {"type": "BertNormalizer", "clean_text": True, "strip_accents": settings.get("strip_accents"),
                  "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
                  "lowercase": settings.get("do_lower_case", True)}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100, "vocab": table}
    added = added_tokens(table, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], settings, more)
    return one_json(added_tokens=added, normalizer=normalizer, pre_tokenizer={"type": "BertPreTokenizer"},
                    post_processor=None, decoder={"type": "WordPiece", "prefix": "##", "cleanup": False}, model=model)


def one_file(directory):
    """(text, path) of a directory's tokenizer.json, or of one made of vocab.json and merges.txt or of vocab.txt, with
    what the files beside them say; `directory` may be the file itself"""
    named = directory if os.path.isfile(directory) else None
    if not named:
        check_directory(directory, "tokenizer.json")
    path = named or first_file(directory, ("tokenizer.json", "encoder.json", "vocab.json", "vocab.txt"))
    if not path or not path.endswith((".json", ".txt")):
        raise BadInput(f"{directory}: expected tokenizer.json, vocab.json with merges.txt, or vocab.txt"
                       f"{'' if named else ' there'}; name another by --tokenizer")
    if path.endswith(".json") and isinstance(console.read_object(path).get("model"), dict):
        return console.read_bytes(path).decode("utf-8"), path
    beside = os.path.dirname(path) or "."
    optional = lambda name: console.read_object(found) if (found := first_file(beside, (name,))) else {}
    settings, more = optional("tokenizer_config.json"), optional("added_tokens.json")
    try:
        if path.endswith(".txt"):
            return word_piece_json(path, settings, more), path
        merges = first_file(beside, ("vocab.bpe", "merges.txt"))
        if not merges:
            raise BadInput(f"{path}: expected merges.txt (or vocab.bpe) beside it")
        return bpe_json(path, merges, settings, more), path
    except (AttributeError, TypeError, ValueError) as e:
        raise BadInput(f"{path}: the files beside it belong to no tokenizer ({type(e).__name__}: {e})") from None


class ByTokenizers:
    """an encoding by the library tokenizers"""

    def encode(self, texts):
        np = need("numpy")
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.uint16) for e in encoded]


class BPE(ByTokenizers):
    """the byte-level BPE of a tokenizer.json. A special token that is spelled in a document is plain text, so that no
    document can end itself; in a prompt scripts/text.py finds it, as transformers does."""
    name = "bpe"

    def __init__(self, directory):
        decoders = need("tokenizers").decoders
        check_directory(directory, "tokenizer.json")
        path = tokenizer_json(directory) or os.path.join(directory, "tokenizer.json")
        table = console.read_object(path)
        self.sha256 = sha256_of(path)
        try:
            model, words, added = table["model"], table["pre_tokenizer"], table.get("added_tokens", [])
            if (model["type"], words["type"], words.get("add_prefix_space", False), words.get("use_regex", True),
                    table.get("normalizer")) != ("BPE", "ByteLevel", False, True, None):
                raise ValueError("another split or model")
            for key in ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"):
                if model.get(key):
                    raise ValueError(f"model.{key}")
            if not byte_characters().keys() <= model["vocab"].keys():
                raise ValueError("a byte without a token")
            if not all(token["special"] for token in added):
                raise ValueError("added tokens that are not special")
            ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
            self.header = len(ids), ids["<|endoftext|>"]
            if sorted(ids.values()) != list(range(min(len(ids), 1 << 16))):
                raise ValueError(f"{len(ids):,} tokens")
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise BadInput(f"{path}: expected a byte-level BPE without a normalizer, with GPT-2's split into words, "
                           f"<|endoftext|> and at most 65,536 tokens ({type(e).__name__}: {e}); WordPiece needs "
                           "--encoding bert") from None
        plain = json.dumps({**table, "added_tokens": [], "post_processor": None})
        self.tokenizer = tokenizer_of(plain, path, True)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.frame = ([self.header[1]], [])

    def decode(self, ids):
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


class BERT(ByTokenizers):
    """BERT's uncased WordPiece; '[MASK]' inside a text is plain text"""
    name = "bert"
    header = VOCABULARIES["bert"][:2]
    frame = ([CLS], [SEP])

    def __init__(self, directory=None):
        if not directory:
            raise BadInput("expected BERT's vocabulary: give --tokenizer DIR with vocab.txt of bert-base-uncased, or "
                           "with any WordPiece tokenizer.json")
        check_directory(directory, "vocab.txt")
        self.path = directory if os.path.isfile(directory) else first_file(directory, ("vocab.txt",))
        if self.path is None:
            raise BadInput(f"{directory}: expected BERT's vocab.txt or a WordPiece tokenizer.json there")
        with open_regular(self.path) as f:
            text = f.read()
        self.sha256 = hashlib.sha256(text).hexdigest()
        size, _, known = VOCABULARIES["bert"]
        if self.sha256 != known:
            raise BadInput(f"{self.path}: an unknown vocabulary: expected bert-base-uncased's {size} lines with sha256 "
                           f"{known[:12]}..., got {text.count(10)} with {self.sha256[:12]}...; any other needs its "
                           "tokenizer.json, which says how a text is split")
        self.tokens = text.decode("utf-8").split("\n")[:size]
        self.tokenizer = tokenizer_of(word_piece_json(self.path), self.path, plain=True)

    def decode(self, ids):
        words = [self.tokens[int(i)] for i in ids]
        return " ".join(words).replace(" ##", "")


class WordPiece(ByTokenizers):
    """the WordPiece of a tokenizer.json; a special token that is spelled in a document is plain text"""
    name = "wordpiece"
    # how a text may be split: at each white space at least, where a document is cut into pieces
    SPLITS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")

    def __init__(self, directory):
        check_directory(directory, "tokenizer.json")
        path = tokenizer_json(directory)
        table = console.read_object(path)
        self.sha256 = sha256_of(path)
        self.tokenizer = tokenizer_of(json.dumps({**table, "post_processor": None}), path, True)
        split = table.get("pre_tokenizer") or {}
        splits = {step["type"] for step in split.get("pretokenizers", [split]) if "type" in step}
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        needed = "[CLS]", "[SEP]", table["model"].get("unk_token", "[UNK]")
        missing = [name for name in needed if name not in vocab]
        if table["model"].get("type") != "WordPiece" or missing or not splits.intersection(self.SPLITS) or sorted(
                vocab.values()) != list(range(min(len(vocab), 1 << 16))):
            raise BadInput(f"{path}: expected WordPiece with [CLS], [SEP], [UNK] and at most 65,536 tokens, which "
                           f"splits a text at white space; got {table['model'].get('type')} with {len(vocab):,} tokens"
                           + "".join(f", no {name}" for name in missing) + f", split by {sorted(splits)}")
        self.tokens = sorted(vocab, key=vocab.get)
        self.header = len(vocab), vocab["[SEP]"]
        self.frame = [vocab["[CLS]"]], [vocab["[SEP]"]]

    decode = BERT.decode


ENCODINGS = {"gpt2": GPT2, "bpe": BPE, "bert": BERT, "wordpiece": WordPiece}


def tokenizer_json(directory):
    """the path of a tokenizer.json, which `directory` may name itself; None if there is none"""
    named = os.path.basename(directory) == "tokenizer.json"
    return directory if named else first_file(directory, ("tokenizer.json",))


def encoding_of(name, directory):
    """the encoding of a directory whose tokenizer.json is not GPT-2's or BERT's vocabulary under its own names: bpe in
    place of gpt2, wordpiece in place of bert"""
    path = tokenizer_json(directory) if directory else None
    if path and name != "gpt2":
        vocab = first_file(directory, ("vocab.txt",))
        if name == "bert" and vocab and sha256_of(vocab) == VOCABULARIES["bert"][2]:
            return "bert"
        model = console.read_object(path).get("model")
        return "wordpiece" if name == "bert" or isinstance(model, dict) and model.get("type") == "WordPiece" else name
    if path:
        try:
            gpt2_ranks(directory)
        except BadInput:
            return "bpe"
    return name


def make_encoding(name, directory):
    return ENCODINGS[name](directory)


def encode_pieces(encoding, pieces, max_tokens):
    """One array of ids per piece. A piece is (text as UTF-8, whether it starts a document, whether it ends one). With
    max_tokens > 0 a piece holds several documents, separated by NUL; each is cut to max_tokens with its frame."""
    np = need("numpy")
    before, after = (np.asarray(x, dtype=np.uint16) for x in encoding.frame)
    if max_tokens:
        groups = [text.split(b"\0") for text, _, _ in pieces]
        ids = iter(encoding.encode([t.decode("utf-8") for group in groups for t in group]))
        room = max_tokens - len(before) - len(after)
        return [np.concatenate([part for _ in group for part in (before, next(ids)[:room], after)]) for group in groups]
    encoded = encoding.encode([text.decode("utf-8") for text, _, _ in pieces])
    return [np.concatenate([before] * first + [ids] + [after] * last) for ids, (_, first, last) in zip(encoded, pieces)]


worker_encoding = None


def start_worker(name, directory):
    """A worker whose parent is killed ends too, also before it has begun."""
    global worker_encoding
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C reaches every process; the parent ends the work
    end_with_parent = lambda: (multiprocessing.parent_process().join(), os._exit(1))
    threading.Thread(target=end_with_parent, daemon=True).start()
    worker_encoding = make_encoding(name, directory)


def work(pieces, max_tokens):
    return encode_pieces(worker_encoding, pieces, max_tokens)


def tasks(pieces):
    """the pieces in bundles of about TASK_BYTES"""
    bundle, size = [], 0
    for piece in pieces:
        bundle.append(piece)
        size += len(piece[0])
        if size >= TASK_BYTES:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle


class Encoder:
    """Computes the ids of pieces, in their order, by `workers` processes (1: in this process)."""

    def __init__(self, name, directory, workers, max_tokens=0):
        self.encoding = make_encoding(name, directory)
        self.max_tokens = max_tokens
        self.workers = workers
        self.pool = None
        if workers > 1:             # spawned, not forked, because threads of this process may hold locks
            self.pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"),
                                            initializer=start_worker, initargs=(name, directory))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def arrays(self, pieces):
        """yields one uint16 array per piece"""
        bundles = tasks(pieces)
        if not self.pool:
            for bundle in bundles:
                yield from encode_pieces(self.encoding, bundle, self.max_tokens)
            return
        submitted = (self.pool.submit(work, bundle, self.max_tokens) for bundle in bundles)
        try:
            running = deque(itertools.islice(submitted, self.workers * TASKS_PER_WORKER))
            while running:
                yield from running.popleft().result()
                running.extend(itertools.islice(submitted, 1))
        except BrokenProcessPool:
            raise BadInput("a tokenizing process died (out of memory?); finished shards are kept: "
                           "run the same command again with fewer --workers") from None
