//! The cache block size of a disk changes while it is in use, and nothing cached is lost by it.

use crate::common::{Bench, content, until};

const MIB: usize = 1 << 20;

#[test]
fn the_cache_stays_when_the_block_size_changes() {
    let mut bench = Bench::with_pool();
    // On a busy machine the origin counts as slow, and what is read ahead waits in RAM.
    bench.start_with(&["--no-prefetch"]);
    let origin = bench.origin("o.img", 8 * MIB, 1);
    bench.ok(&[
        "disk",
        "add",
        "vm",
        "--origin",
        &origin,
        "--seq-cutoff",
        "0",
    ]);
    let mut client = bench.connect("vm").unwrap();
    // A quarter of the disk, every fourth block of it, as 4 KiB fills.
    let blocks: Vec<u64> = (0..512).step_by(4).collect();
    for block in &blocks {
        client.read(block * 4096, 4096);
    }
    client.write(3 * MIB as u64, &[9; 16384]);
    let cached = blocks.len() as u64 * 4096 + 16384;
    until("all is cached", || {
        (bench.disk("vm")["cached"].as_u64()? >= cached).then_some(())
    });
    let hits = |bench: &Bench| {
        let stats = bench.json(&["stats", "vm"]);
        let counters = &stats["spans"][0]["counters"];
        (
            counters["read_hits"].as_u64().unwrap(),
            counters["read_misses"].as_u64().unwrap(),
        )
    };
    let set = bench.json(&["disk", "set", "vm", "--block-size", "64K"]);
    assert_eq!(set["block_size"], 65_536);
    assert_eq!(bench.disk("vm")["cached"].as_u64(), Some(cached));
    let before = hits(&bench);
    for block in &blocks {
        let at = *block as usize * 4096;
        let data = client.read(block * 4096, 4096);
        assert_eq!(data, content(8 * MIB, 1)[at..at + 4096]);
    }
    assert_eq!(client.read(3 * MIB as u64, 16384), [9; 16384]);
    // The last one may be counted after it was answered.
    until("all are hits", || {
        (hits(&bench).0 - before.0 == blocks.len() as u64 + 1).then_some(())
    });
    assert_eq!(hits(&bench).1, before.1, "none is a miss");
    // A miss now brings in its 64 KiB, around what was there.
    client.read(4 * MIB as u64 + 20_480, 4096);
    until("the whole unit is cached", || {
        (bench.disk("vm")["cached"].as_u64()? >= cached + 65_536).then_some(())
    });
    let before = hits(&bench);
    assert_eq!(
        client.read(4 * MIB as u64, 65_536),
        content(8 * MIB, 1)[4 * MIB..4 * MIB + 65_536]
    );
    assert_eq!(hits(&bench).0 - before.0, 1);
    // And back, over a restart.
    bench.ok(&["disk", "set", "vm", "--block-size", "4K"]);
    drop(client);
    let cached = bench.disk("vm")["cached"].as_u64().unwrap();
    bench.stop();
    bench.start();
    let vm = bench.disk("vm");
    assert_eq!(
        (vm["block_size"].as_u64(), vm["cached"].as_u64()),
        (Some(4096), Some(cached))
    );
    let mut client = bench.connect("vm").unwrap();
    client.read(6 * MIB as u64, 4096);
    until("one block more is cached", || {
        (bench.disk("vm")["cached"].as_u64()? == cached + 4096).then_some(())
    });
}
