// As much of an NFS client as it takes to use a file of a datastore as a hypervisor does: RFC 1813 over TCP, one call
// at a time. No kernel's client, which takes root and a mount that somebody has to undo.
import { connect } from "node:net";

const NFS = 100003;
const MOUNT = 100005;
/** Bytes of a file's attributes. */
const ATTRIBUTES = 84;

const word = (n) => {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32BE(n);
  return bytes;
};
const long = (n) => {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64BE(BigInt(n));
  return bytes;
};
const opaque = (data) => Buffer.concat([word(data.length), data, Buffer.alloc((4 - (data.length % 4)) % 4)]);
const text = (name) => opaque(Buffer.from(name));

class Answer {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }
  word() {
    this.at += 4;
    return this.bytes.readUInt32BE(this.at - 4);
  }
  skip(n) {
    this.at += n;
  }
  opaque() {
    const length = this.word();
    const data = this.bytes.subarray(this.at, this.at + length);
    this.at += length + ((4 - (length % 4)) % 4);
    return data;
  }
  ok(what) {
    const status = this.word();
    if (status !== 0) throw new Error(`${what}: NFS status ${status}`);
    return this;
  }
}

export class Nfs {
  /** A client of what is mounted as `path` from `listen`, who is root. */
  static async mount(listen, path) {
    const nfs = new Nfs();
    const [host, port] = [listen.slice(0, listen.lastIndexOf(":")), Number(listen.split(":").pop())];
    nfs.socket = connect(port, host);
    nfs.xid = 1;
    nfs.got = Buffer.alloc(0);
    nfs.waiting = null;
    nfs.socket.on("data", (piece) => nfs.take(piece));
    const broke = (e) => nfs.waiting?.failed(e ?? new Error("the server closed the connection"));
    nfs.socket.on("error", broke);
    nfs.socket.on("close", () => broke());
    nfs.root = (await nfs.call(MOUNT, 1, text(path))).ok("mount").opaque();
    return nfs;
  }

  take(piece) {
    this.got = Buffer.concat([this.got, piece]);
    while (this.got.length >= 4) {
      const head = this.got.readUInt32BE(0);
      const length = head & 0x7fffffff;
      if (this.got.length < 4 + length) return;
      const record = this.got.subarray(4, 4 + length);
      this.got = this.got.subarray(4 + length);
      this.waiting?.told(record);
    }
  }

  async call(program, procedure, args) {
    const name = text("test");
    const credential = Buffer.concat([word(0), name, word(0), word(0), word(0)]);
    const body = Buffer.concat([
      ...[this.xid++, 0, 2, program, 3, procedure, 1].map(word),
      opaque(credential),
      word(0),
      word(0),
      args,
    ]);
    const record = await new Promise((told, failed) => {
      this.waiting = { told, failed };
      this.socket.write(Buffer.concat([word((0x80000000 | body.length) >>> 0), body]));
    });
    this.waiting = null;
    const answer = new Answer(record);
    answer.skip(12);
    answer.word();
    answer.opaque();
    if (answer.word() !== 0) throw new Error("the call was not accepted");
    return answer;
  }

  /** Makes a file of this size; its handle. */
  async create(name, size) {
    const attributes = Buffer.concat([word(1), word(0o644), word(0), word(0), word(1), long(size), word(0), word(0)]);
    const answer = (await this.call(NFS, 8, Buffer.concat([opaque(this.root), text(name), word(0), attributes]))).ok("create");
    answer.word();
    return answer.opaque();
  }

  async write(file, offset, data) {
    const durably = 2;
    (await this.call(NFS, 7, Buffer.concat([opaque(file), long(offset), word(data.length), word(durably), opaque(data)]))).ok("write");
  }

  async read(file, offset, length) {
    const answer = (await this.call(NFS, 6, Buffer.concat([opaque(file), long(offset), word(length)]))).ok("read");
    if (answer.word() === 1) answer.skip(ATTRIBUTES);
    answer.skip(8);
    return answer.opaque();
  }

  close() {
    this.socket.destroy();
  }
}
