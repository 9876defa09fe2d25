"""A mail server for tests: python3 smtp-server.py starttls|tls PORT DIR CERT KEY USER PASSWORD

Takes mail only over TLS and from who knows the password. Each mail becomes a file in DIR, whose first line
names the recipients. Says "ready" once it listens; ends with its standard input.
"""

import os
import ssl
import sys

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

mode, port, directory, cert, key, user, password = sys.argv[1:]


class Keep:
    count = 0

    async def handle_DATA(self, server, session, envelope):
        Keep.count += 1
        name = os.path.join(directory, f"{Keep.count:04}")
        with open(name + ".new", "wb") as file:
            file.write(" ".join(envelope.rcpt_tos).encode() + b"\n" + envelope.content)
        os.rename(name + ".new", name + ".mail")
        return "250 OK"


def judge(server, session, envelope, mechanism, data):
    good = isinstance(data, LoginPassword) and data == LoginPassword(user.encode(), password.encode())
    # Not handled: the server still has to answer.
    return AuthResult(success=good, handled=False)


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(cert, key)
options = {"auth_required": True, "authenticator": judge}
if mode == "starttls":
    options |= {"tls_context": context, "require_starttls": True}
else:
    # All of the connection is encrypted, of which this part of the server does not know.
    options |= {"ssl_context": context, "auth_require_tls": False}
controller = Controller(Keep(), hostname="127.0.0.1", port=int(port), **options)
controller.start()
print("ready", flush=True)
sys.stdin.read()
controller.stop()
