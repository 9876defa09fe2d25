//! A RAM disk over NBD: the protocol and the reactor without a cache behind them, to measure
//! what they cost. `ramdisk SOCKET [MIB]`; ends when standard input does.

#[path = "../tests/it/common/mod.rs"]
mod common;
#[path = "../tests/it/socket.rs"]
mod socket;

use std::io::Read;
use std::path::Path;

fn main() {
    let mut args = std::env::args().skip(1);
    let Some(path) = args.next() else {
        eprintln!("usage: ramdisk SOCKET [MIB]");
        std::process::exit(2);
    };
    let mib: u64 = args.next().and_then(|n| n.parse().ok()).unwrap_or(256);
    let disk = common::Disk::new(1, "ram", mib << 20);
    let reactors = socket::start(vec![disk], None, Path::new(&path));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    reactors.stop();
}
