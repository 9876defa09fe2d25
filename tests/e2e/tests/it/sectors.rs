//! Writes of single sectors over devices that take nothing smaller than 4 KiB.
//!
//! Exclusive: loop devices

use crate::users::Loop;
use anyhow::{Result, anyhow, ensure};
use hearth_rig::Hearth;
use std::fs::File;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;
/// Blocks that all clients write.
const BLOCKS: u64 = 8;
const ROUNDS: u64 = 60;

/// Clients that write different sectors of the same blocks at the same time: each sector holds what its
/// client wrote last, over the export and, once it is flushed, in the origin.
#[test]
fn concurrent_sector_writes_lose_nothing() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    let (flash, origin) = (hearth.dir().join("flash"), hearth.dir().join("origin"));
    File::create(&flash)?.set_len(300 * MIB)?;
    File::create(&origin)?.set_len(16 * MIB)?;
    let wide = |file| Loop::new("sectors", file, &["--sector-size=4096", "--direct-io=on"]);
    let (Some(on_flash), Some(on_origin)) = (wide(&flash), wide(&origin)) else {
        return Ok(());
    };
    hearth.set_flash(on_flash.0.clone().into());
    hearth.ok(&["pool", "create", "--flash", &on_flash.0])?;
    hearth.start()?;
    hearth.add("d", &on_origin.0, &[])?;
    for mode in [
        "write-back",
        "write-back-ordered",
        "write-through",
        "write-around",
        "off",
    ] {
        hearth.ok(&["disk", "set", "d", "--mode", mode])?;
        let clients = (0..BLOCK / SECTOR).map(|sector| Ok((sector, hearth.connect("d")?)));
        let clients = clients.collect::<Result<Vec<_>>>()?;
        std::thread::scope(|scope| {
            let write = |sector: u64, mut client: hearth_rig::nbd::Client| -> Result<()> {
                for round in 0..ROUNDS {
                    let at = round % BLOCKS * BLOCK + sector * SECTOR;
                    let data = [(sector * 16 + round % 16) as u8; SECTOR as usize];
                    client.write(at, &data)?;
                    let found = client.read(at, SECTOR as u32)?;
                    ensure!(found == data, "{mode}: sector {sector}, round {round}");
                    if round % 7 == 0 {
                        client.flush()?;
                    }
                }
                Ok(())
            };
            let threads: Vec<_> = clients
                .into_iter()
                .map(|(sector, client)| scope.spawn(move || write(sector, client)))
                .collect();
            threads.into_iter().try_for_each(|thread| {
                let ended = thread.join();
                ended.map_err(|_| anyhow!("a client panicked"))?
            })
        })?;
        hearth.ok(&["disk", "flush", "d"])?;
        let len = (BLOCKS * BLOCK) as usize;
        let served = hearth.connect("d")?.read(0, len as u32)?;
        ensure!(std::fs::read(&origin)?[..len] == served, "{mode}");
    }
    Ok(())
}
