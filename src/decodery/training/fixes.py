"""Small programs before and after a security fix, made of templates: what SVEN's prefixes learn from by default."""

from __future__ import annotations

from .programs import ProgramPair

# A program about $noun in which `@` is what the fix changes, and that before and after it.
_TEMPLATES = (
    # Documents that may build any object.
    (
        "import yaml\n\ndef load_$noun(path):\n    with open(path) as file:\n        return yaml.@load(file)\n",
        "",
        "safe_",
    ),
    ("import yaml\n\ndef parse_$noun(text):\n    $noun = yaml.@load(text)\n    return $noun\n", "", "safe_"),
    ('import yaml\n\n$noun = yaml.@load(open("$noun.yml"))\nprint($noun)\n', "", "safe_"),
    (
        "import yaml\n\nclass Store:\n    def read(self, stream):\n        self.$noun = yaml.@load(stream)\n",
        "",
        "safe_",
    ),
    # Commands that a shell reads.
    (
        "import subprocess\n\ndef unpack_$noun(path):\n    subprocess.run(@)\n",
        '"tar xf " + path, shell=True',
        '["tar", "xf", path]',
    ),
    (
        "import subprocess\n\ndef list_$noun(folder):\n    return subprocess.check_output(@)\n",
        'f"ls {folder}", shell=True',
        '["ls", folder]',
    ),
    (
        "import subprocess\n\ndef ping_$noun(host):\n    return subprocess.call(@)\n",
        '"ping " + host, shell=True',
        '["ping", host]',
    ),
    (
        "import subprocess\n\ndef print_$noun(name):\n    subprocess.Popen(@)\n",
        '"lpr %s" % name, shell=True',
        '["lpr", name]',
    ),
    # Statements that hold their values as text.
    (
        "def find_$noun(cursor, name):\n"
        '    cursor.execute("SELECT * FROM $noun WHERE name = @)\n'
        "    return cursor.fetchall()\n",
        "'%s'\" % name",
        '?", (name,)',
    ),
    (
        "def delete_$noun(db, id):\n    db.execute(@)\n    db.commit()\n",
        'f"DELETE FROM $noun WHERE id = {id}"',
        '"DELETE FROM $noun WHERE id = ?", (id,)',
    ),
    (
        "def count_$noun(conn, owner):\n"
        "    cur = conn.cursor()\n"
        '    cur.execute("SELECT count(*) FROM $noun WHERE owner = @)\n',
        '\'" + owner + "\'"',
        '?", (owner,)',
    ),
    (
        'def rename_$noun(cursor, id, name):\n    cursor.execute("UPDATE $noun SET name = @)\n',
        "'{}' WHERE id = {}\".format(name, id)",
        '? WHERE id = ?", (name, id)',
    ),
    # Digests that can be forged.
    ("import hashlib\n\ndef hash_$noun(data):\n    return hashlib.@(data).hexdigest()\n", "md5", "sha256"),
    (
        "import hashlib\n"
        "\n"
        "def sign_$noun(text):\n"
        "    digest = hashlib.@(text.encode())\n"
        "    return digest.hexdigest()\n",
        "sha1",
        "sha256",
    ),
    (
        "import hashlib\n"
        "\n"
        "class Key:\n"
        "    def __init__(self, $noun):\n"
        "        self.value = hashlib.@($noun).digest()\n",
        "md5",
        "sha256",
    ),
    (
        "import hashlib\n"
        "\n"
        "def check_$noun(path):\n"
        "    hasher = hashlib.@()\n"
        '    hasher.update(open(path, "rb").read())\n'
        "    return hasher\n",
        "md5",
        "sha256",
    ),
    # Text that is run.
    ("import ast\n\ndef parse_$noun(text):\n    return @eval(text)\n", "", "ast.literal_"),
    (
        'import ast\n\ndef read_$noun(line):\n    key, value = line.split("=")\n    return key, @eval(value)\n',
        "",
        "ast.literal_",
    ),
    ('import ast\n\n$noun = @eval(input("$noun: "))\nprint($noun)\n', "", "ast.literal_"),
    (
        "import ast\n"
        "\n"
        "def load_$noun(path):\n"
        "    with open(path) as file:\n"
        "        $noun = @eval(file.read())\n"
        "    return $noun\n",
        "",
        "ast.literal_",
    ),
)

_NOUNS = ("config", "report", "invoice", "archive", "order", "backup", "picture", "recipe", "ticket", "letter")


def built_in_pairs(count: int) -> list[ProgramPair]:
    """The first `count` of 200 pairs: every template about one thing, then about the next one."""
    made = [
        ProgramPair(*(frame.replace("@", change).replace("$noun", noun) for change in (before, after)))
        for noun in _NOUNS
        for frame, before, after in _TEMPLATES
    ]
    return made[:count]
