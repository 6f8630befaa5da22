"""Whether a page is well formed and stands alone."""

from html.parser import HTMLParser

VOID = {"meta", "br", "rect", "img", "link", "input", "hr"}


class Balance(HTMLParser):
    """open: tags never closed. problems: closed out of order. references: what the page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.problems, self.references = [], [], []

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in {"src", "href", "action", "data"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.problems.append((tag, self.getpos()))
