//! What one change of a pool's registry costs on a file or device, with so many disks: bytes written,
//! flushes, time. `cargo run --example registry_cost -- FILE` (its content is lost). "Whole" is a
//! store of both copies at every change, as a registry without a journal needs.

use hearth_format::{DiskRecord, Layout, Places, Registry, Uuid};
use hearth_io::{BlockFile, Media, OpenMode};
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const POOL: Uuid = Uuid::from_u128(1);
/// The areas every pool has.
const FIRST: [u64; 2] = [2 << 20, 3 << 20];
/// Changes measured for each row.
const CHANGES: usize = 200;

/// Counts what is asked of a file.
struct Counted {
    file: BlockFile,
    bytes: usize,
    flushes: usize,
}

impl Media for Counted {
    fn len(&self) -> u64 {
        self.file.size()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, data)
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.bytes += data.len();
        self.file.write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.flushes += 1;
        self.file.flush()
    }
}

fn registry(count: u16) -> Registry {
    let disk = |id: u16| DiskRecord {
        id,
        name: format!("vm-{id:05}"),
        origin: format!("file:/srv/images/pool-1/vm-{id:05}/disk-0.img"),
        size: 100 << 30,
        rules: 1,
        clients: 16,
        origin_identity: Some(Default::default()),
        ..DiskRecord::default()
    };
    Registry {
        disks: (1..=count).map(|id| disk(id).into()).collect(),
        ..Registry::default()
    }
}

/// Makes so many changes and prints the median; `store` takes the old and the new registry.
fn measure(
    what: &str,
    media: &mut Counted,
    mut now: Registry,
    mut store: impl FnMut(&mut Counted, &Registry, &mut Registry) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let count = now.disks.len();
    let (mut times, mut in_ram) = (Vec::new(), Vec::new());
    (media.bytes, media.flushes) = (0, 0);
    for change in 0..CHANGES {
        let begin = Instant::now();
        // As the daemon does it.
        let mut next = now.clone();
        if let Some(disk) = next.disks.get_mut(change * 7 % count) {
            disk.clean_detach = !disk.clean_detach;
        }
        let changed = next != now;
        in_ram.push(begin.elapsed());
        if changed {
            store(media, &now, &mut next)?;
        }
        now = next;
        times.push(begin.elapsed());
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times.get(times.len() / 2).map_or(0, Duration::as_micros)
    };
    println!(
        "{count:>6} disks  {what:<8} {:>9} bytes  {:.2} flushes  {:>6} us, of which {} us in RAM",
        media.bytes / CHANGES,
        media.flushes as f64 / CHANGES as f64,
        median(&mut times),
        median(&mut in_ram),
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = PathBuf::from(std::env::args().nth(1).ok_or("name a file or device")?);
    let file = BlockFile::open(&path, OpenMode::default())?;
    let layout = Layout::for_device(file.size(), Layout::segment_blocks_for(file.size()))?;
    let mut media = Counted {
        file,
        bytes: 0,
        flushes: 0,
    };
    for count in [10, 100, 400, 1000, 4000, 32_767] {
        let whole = registry(count);
        if whole.encode(POOL)?.len() <= 1 << 20 {
            measure("whole", &mut media, whole.clone(), |media, _, next| {
                next.generation += 1;
                let bytes = next.encode(POOL)?;
                let mut other = bytes.clone();
                media.read_at(FIRST[1], &mut other)?;
                let _ = Registry::decode(&other, POOL);
                for area in FIRST {
                    media.write_at(area, &bytes)?;
                    media.flush()?;
                }
                Ok(())
            })?;
        }
        let mut places = Places::new(&layout)?;
        let mut now = whole;
        let nothing = Registry::default();
        if let Err(e) = places.store(&mut media, &layout, POOL, &nothing, &mut now) {
            println!("{count:>6} disks: {e}");
            continue;
        }
        measure("now", &mut media, now, |media, old, next| {
            Ok(places.store(media, &layout, POOL, old, next)?)
        })?;
        let begin = Instant::now();
        Places::load(&mut media, &layout, POOL)?;
        println!(
            "{count:>6} disks  read in {} ms",
            begin.elapsed().as_millis()
        );
        // The next row starts with areas nobody used.
        for area in FIRST {
            media.write_at(area, &[0; 4096])?;
        }
    }
    Ok(())
}
