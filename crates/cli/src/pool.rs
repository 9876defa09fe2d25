//! `hearth pool …`: on flash that is not being served, or through the daemon.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use hearth_daemon::api::types::{self, DiskInfo, DiskRef, Done, PoolInfo};
use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use hearth_daemon::pool::{self, CreateOptions, DeviceAt, Pool};
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_fault::Fault;

use crate::args::{self, Global, PoolAdopt, PoolCreate, PoolExport, PoolImport, PoolShow};
use crate::disk;
use crate::interrupt::Interrupt;
use crate::status::StatusLine;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json};

mod flash;

/// How often an export is looked at.
const POLL: Duration = Duration::from_millis(100);

/// Looks that clients which have just gone are given to be gone.
const GONE_POLLS: usize = 10;

pub fn run(global: &Global, command: args::Pool) -> Outcome {
    match command {
        args::Pool::Create(args) => create(global, &args),
        args::Pool::Show(args) => show(global, &args),
        args::Pool::Import(args) => import(global, &args),
        args::Pool::AdoptFlash(args) => adopt(global, &args),
        args::Pool::Export(at) => export(global, &at),
        args::Pool::AddFlash(args) => flash::add(global, &args),
        args::Pool::ReplaceFlash(args) => flash::replace(global, &args),
        args::Pool::RemoveFlash(args) => flash::remove(global, &args),
    }
}

fn create(global: &Global, args: &PoolCreate) -> Outcome {
    let devices = devices_of(args)?;
    let options = CreateOptions {
        size: devices.first().and_then(|d| d.size),
        quick: args.quick,
        force: args.force,
        label: args.label.clone(),
        twice: args.dirty_copies == 2,
    };
    let mut notices = Vec::new();
    for device in &devices {
        let options = CreateOptions {
            size: device.size,
            ..options.clone()
        };
        notices.append(&mut hearth_daemon::place::check(&device.path, &options)?);
    }
    let mut info = written(global, |progress| match devices.as_slice() {
        [one] if !options.twice => pool::create_with(&one.path, &options, progress),
        several => pool::create_several(several, &options, progress),
    })?;
    notices.append(&mut info.notices);
    info.notices = notices;
    if global.json {
        return print_json(&info);
    }
    for notice in &info.notices {
        eprintln!("note: {}", plain(notice));
    }
    println!(
        "pool {} created on {}",
        info.uuid,
        plain(&info.flash.join(", "))
    );
    println!(
        "{} for data, in {} segments of {}",
        human(info.log_bytes),
        info.segments,
        human(info.segment_bytes)
    );
    let per_block = info.ram as f64 / (info.log_bytes / 4096).max(1) as f64;
    println!(
        "RAM: {} at most; {} for the index of a full pool ({per_block:.1} bytes for each 4 KiB block), up to {} for the RAM stage, the rest for clients",
        human(info.ram_most),
        human(info.ram),
        human(info.ram_stage_most)
    );
    println!("serve it with `hearth serve{}`", named(&info.flash));
    Ok(())
}

/// Flash devices as a command names them.
fn named(flash: &[String]) -> String {
    let named = flash.iter().map(|path| format!(" --flash {}", plain(path)));
    named.collect()
}

/// The devices of a new pool with the sizes of their files.
fn devices_of(args: &PoolCreate) -> Result<Vec<DeviceAt>, Error> {
    let sizes = match (args.size.as_slice(), args.flash.len()) {
        ([], n) => vec![None; n],
        ([one], n) => vec![Some(one.0); n],
        (each, n) if each.len() == n => each.iter().map(|s| Some(s.0)).collect(),
        (each, n) => {
            return Err(Error::invalid(
                format!("{} sizes are given for {n} flash devices", each.len()),
                "give one --size for all of them, or one for each in their order",
            ));
        }
    };
    let devices = args.flash.iter().zip(sizes);
    let devices = devices.map(|(path, size)| DeviceAt {
        path: path.clone(),
        size,
    });
    Ok(devices.collect())
}

/// Does what `make` does, which writes a file, with progress.
fn written<T>(
    global: &Global,
    make: impl FnOnce(&mut dyn FnMut(u64, u64) -> bool) -> Result<T, Error>,
) -> Result<T, Failure> {
    let interrupt = Interrupt::watch();
    let begin = Instant::now();
    // Shown if it takes longer than a moment.
    let mut line = StatusLine::new(!global.json).quiet_for(Duration::from_secs(1));
    let made = make(&mut |done, total| {
        line.show(|| {
            let left = begin.elapsed().as_secs_f64() * (total - done) as f64 / done.max(1) as f64;
            format!(
                "writing the file: {} of {}, {} left",
                human(done),
                human(total),
                human_seconds(left)
            )
        });
        !interrupt.hit()
    });
    line.end();
    made.map_err(|e| {
        if interrupt.hit() {
            Failure::Interrupted(e.into())
        } else {
            e.into()
        }
    })
}

fn adopt(global: &Global, args: &PoolAdopt) -> Outcome {
    let path = &args.flash;
    let options = CreateOptions {
        size: args.size.map(|s| s.0),
        quick: args.quick,
        force: args.force,
        label: String::new(),
        twice: false,
    };
    let state_dir = args
        .state_dir
        .clone()
        .unwrap_or_else(hearth_daemon::rundir::default_state_dir);
    let mut notices = hearth_daemon::place::check(path, &options)?;
    let (mut info, lost) = written(global, |progress| {
        pool::adopt_flash(path, &options, &state_dir, args.pool.as_deref(), progress)
    })?;
    notices.append(&mut info.notices);
    notices.extend(lost.iter().map(|name| {
        format!(
            "something written to disk {name} was on the old flash only; if that can still be read, `hearth rescue` saves it; to go on with what the origin has: `hearth disk set {name} --trust origin`"
        )
    }));
    info.notices = notices;
    if global.json {
        return print_json(&info);
    }
    for notice in &info.notices {
        eprintln!("note: {}", plain(notice));
    }
    println!(
        "pool {} is on {} now, with {} {}",
        info.uuid,
        path.display(),
        info.disks.len(),
        if info.disks.len() == 1 {
            "disk"
        } else {
            "disks"
        }
    );
    println!("serve it with `hearth serve --flash {}`", path.display());
    Ok(())
}

/// How often a pool has its data that keeps what is dirty twice.
fn copies(of_clean: u32, lost: bool) -> String {
    let now = if lost { "2, and 1 now" } else { "2" };
    match of_clean {
        1 => format!("{now} of what is dirty, 1 of what is clean"),
        _ => now.to_owned(),
    }
}

fn print_pool(global: &Global, info: &PoolInfo) -> Outcome {
    if global.json {
        return print_json(info);
    }
    let mut table = Table::new(&["pool", &info.uuid]);
    let mut line = |key: &str, value: String| table.row([key.to_owned(), value]);
    if !info.label.is_empty() {
        line("label", plain(&info.label));
    }
    line("flash", plain(&info.flash.join(", ")));
    line(
        "state",
        match info.state.as_str() {
            "new" => "new, never served".to_owned(),
            "dirty" => "in use, or not stopped cleanly".to_owned(),
            "clean" => "stopped cleanly".to_owned(),
            "failed" => "the flash has failed".to_owned(),
            "cache-off" => "serving from the origins, cache off".to_owned(),
            "leaving" => "serving from the origins, leaving the flash".to_owned(),
            other => plain(other),
        },
    );
    if let Some(capacity) = info.capacity {
        line("capacity", human(capacity));
    }
    line(
        "log",
        match info.segments {
            0 => "none, as the flash is gone".to_owned(),
            segments => format!(
                "{} in {segments} segments of {}",
                human(info.log_bytes),
                human(info.segment_bytes)
            ),
        },
    );
    if info.dirty_copies > 1 {
        let lost = info.devices.iter().any(|device| device.lost);
        line("copies", copies(info.clean_copies, lost));
    }
    if let (Some(cached), Some(dirty)) = (info.cached, info.dirty) {
        line("cached", human(cached));
        let unknown = info.disks.iter().filter(|d| d.dirty.is_none()).count();
        line(
            "dirty",
            match unknown {
                0 => human(dirty),
                1 => format!("{}, and an unknown amount of 1 disk", human(dirty)),
                n => format!("{}, and an unknown amount of {n} disks", human(dirty)),
            },
        );
        if info.promised_most > 0 {
            line(
                "promised",
                format!(
                    "{} of {} to disks that live on flash",
                    human(info.promised),
                    human(info.promised_most)
                ),
            );
        }
    }
    if let Some(why) = &info.unknown {
        line("dirty", format!("not known: {}", plain(why)));
    }
    line(
        "RAM at most",
        format!(
            "{}, {} of it for the index",
            human(info.ram_most),
            human(info.ram)
        ),
    );
    let most = human(info.ram_stage_most);
    line(
        "RAM stage",
        match info.ram_stage {
            Some(now) => format!("{} of at most {most}", human(now)),
            None => format!("at most {most}"),
        },
    );
    if let Some(r) = &info.recovery {
        line(
            "opened from",
            format!(
                "{} in {} ms: {} blocks, {} dirty",
                r.how, r.millis, r.cached_blocks, r.dirty_blocks
            ),
        );
    }
    if let (Some(io), Some(threads)) = (&info.io, info.threads) {
        line("I/O", format!("{io}, {threads} threads"));
    }
    for s in &info.stuck {
        let seconds = human_seconds(s.seconds as f64);
        line(
            "STUCK",
            format!("{} for {seconds}; its clients get no answers", s.thread),
        );
    }
    print!("{}", table.render());
    if info.devices.len() > 1 {
        println!();
        print!("{}", layout_of(info));
    }
    for notice in &info.notices {
        println!("warning: {}", plain(notice));
    }
    if !info.claims.is_empty() {
        println!();
        print!("{}", claims(info));
    }
    if info.disks.is_empty() {
        println!("no disks");
        return Ok(());
    }
    println!();
    let mut table = Table::new(&["DISK", "MODE", ">SIZE", ">CACHED", ">DIRTY", "ORIGIN"]);
    let known = |bytes: Option<u64>| bytes.map_or("?".to_owned(), human);
    for d in &info.disks {
        let missing = match (is_confirmed(info, d), d.origin_found) {
            (false, _) => "  (not confirmed)",
            (true, true) => "",
            (true, false) => "  (not found here)",
        };
        table.row([
            plain(&d.name),
            d.mode.word().to_owned(),
            human(d.size),
            known(d.cached),
            d.dirty.map_or("unknown".to_owned(), human),
            format!("{}{missing}", plain(&d.origin)),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}

/// Whether the origin of a disk is confirmed on this host.
fn is_confirmed(info: &PoolInfo, disk: &DiskRef) -> bool {
    let of = format!("disk {}", disk.name);
    !info.claims.iter().any(|c| c.of == of && !c.confirmed)
}

/// Lists what the pool names outside it.
fn claims(info: &PoolInfo) -> String {
    let mut table = Table::new(&["OUTSIDE THE POOL", "CONFIRMED", "USES"]);
    for claim in &info.claims {
        let confirmed = if claim.confirmed { "yes" } else { "NO" };
        table.row([
            plain(&claim.of),
            confirmed.to_owned(),
            plain(&claim.reaches),
        ]);
    }
    table.render()
}

/// Draws what is on which device.
fn layout_of(info: &PoolInfo) -> String {
    // While one is lost nothing is there twice.
    let twice = info.dirty_copies > 1 && !info.devices.iter().any(|device| device.lost);
    let (clean, dirty) = match (twice, info.clean_copies) {
        (false, _) => (">CLEAN", ">DIRTY"),
        (true, 1) => (">CLEAN, ONCE", ">DIRTY, TWICE"),
        (true, _) => (">CLEAN, TWICE", ">DIRTY, TWICE"),
    };
    let mut table = Table::new(&[
        "FLASH DEVICE",
        "MODEL",
        "STATE",
        ">SIZE",
        clean,
        dirty,
        "FILLED",
        ">READ",
        ">WRITTEN",
        ">ERRORS",
    ]);
    for device in &info.devices {
        let known = |bytes: Option<u64>| bytes.map_or("?".to_owned(), human);
        let used = device.free_segments.map(|free| {
            let used = device.segments.saturating_sub(free);
            bar(used, device.segments)
        });
        let io = device.io.as_ref();
        table.row([
            plain(&device.path),
            plain(device.model.as_deref().unwrap_or("-")),
            match (device.state.as_str(), device.emptied_percent) {
                _ if device.lost => "LOST".to_owned(),
                ("emptying", Some(percent)) => format!("being emptied, {percent} %"),
                ("in-use" | "", _) if device.swap > 0 => {
                    format!("in use, {} of it for swap", human(device.swap))
                }
                ("in-use" | "", _) => "in use".to_owned(),
                (other, _) => plain(other),
            },
            human(device.bytes),
            known(device.clean),
            known(device.dirty),
            used.unwrap_or_default(),
            io.map_or(String::new(), |io| human(io.read_bytes)),
            io.map_or(String::new(), |io| human(io.write_bytes)),
            io.map_or(String::new(), |io| io.errors.to_string()),
        ]);
    }
    table.render()
}

/// How much of a whole, in twenty characters and per cent.
fn bar(part: u64, whole: u64) -> String {
    const WIDTH: u64 = 20;
    let filled = (part * WIDTH).div_ceil(whole.max(1)).min(WIDTH);
    let (full, empty) = (
        "#".repeat(filled as usize),
        ".".repeat((WIDTH - filled) as usize),
    );
    format!("{full}{empty} {:>3} %", part * 100 / whole.max(1))
}

impl PoolShow {
    fn state_dir(&self) -> PathBuf {
        let given = self.state_dir.clone();
        given.unwrap_or_else(hearth_daemon::rundir::default_state_dir)
    }
}

fn show(global: &Global, args: &PoolShow) -> Outcome {
    let flash = &args.at.flash;
    let info = if flash.is_empty() {
        Client::new(&global.dir()).get("/v1/pool")?
    } else {
        pool::show(flash, &args.state_dir())?
    };
    print_pool(global, &info)
}

fn import(global: &Global, args: &PoolImport) -> Outcome {
    let flash = &args.show.at.flash;
    if flash.is_empty() {
        // A daemon has imported its pool by serving it; without one there is nothing to import.
        let client = Client::new(&global.dir());
        let info: PoolInfo = match args.accept {
            true => client.order("/v1/pool/accept")?,
            false => client.get("/v1/pool")?,
        };
        return print_pool(global, &info);
    }
    let mut pool = Pool::open_all(flash)?;
    let state_dir = args.show.state_dir();
    match args.accept {
        true => pool.accept_claims(&state_dir)?,
        false => pool.look_for_claims(&state_dir)?,
    }
    let info = pool.info_with_contents();
    print_pool(global, &info)?;
    if global.json {
        return Ok(());
    }
    println!();
    let missing: Vec<String> = info
        .disks
        .iter()
        .filter(|d| is_confirmed(&info, d) && !d.origin_found)
        .map(|d| plain(&d.name))
        .collect();
    if !missing.is_empty() {
        println!(
            "the origin of {} is missing or too small here; put it at the same path, and the disk attaches by itself",
            missing.join(", ")
        );
    }
    // One that is lost may have no path.
    let there = info.devices.iter().filter(|device| !device.lost);
    let there: Vec<String> = there.map(|device| device.path.clone()).collect();
    if info.claims.iter().any(|claim| !claim.confirmed) {
        println!(
            "what is not confirmed is not used on this host; to confirm all that is listed: `hearth pool import --accept{}{}`",
            named(&there),
            (args.show.state_dir.as_ref())
                .map_or_else(String::new, |dir| format!(" --state-dir {}", dir.display()))
        );
    }
    println!("ready; serve it with `hearth serve{}`", named(&there));
    Ok(())
}

fn export(global: &Global, args: &PoolExport) -> Outcome {
    let at = &args.at;
    if !at.flash.is_empty() {
        hearth_daemon::serve::export_offline(&at.flash, args.state_dir.clone())?;
        return exported(global);
    }
    let client = Client::new(&global.dir());
    let served: PoolInfo = client.get("/v1/pool")?;
    let interrupt = Interrupt::watch();
    if !args.yes {
        // Told before the flush, which may take long, and by the daemon once more after it.
        let mut used = used(&client)?;
        for _ in 0..GONE_POLLS {
            if used.is_none() || interrupt.sleep(POLL) {
                break;
            }
            used = self::used(&client)?;
        }
        if let Some(disk) = used {
            return Err(Error::refused(
                format!(
                    "disk {} is in use by {}",
                    plain(&disk.name),
                    plain(&hearth_daemon::clients::sentence(&disk.clients))
                ),
                "stop the virtual machine or program first, or cut it off with --yes",
            )
            .into());
        }
    }
    // The bulk is written while the disks go on, with progress, and can be called off.
    disk::flush_all(global, &client, &interrupt)?;
    let how = types::PoolExport { yes: args.yes };
    client.post::<_, Done>("/v1/pool/export", &how)?;
    while client.is_up() {
        if interrupt.sleep(POLL) {
            return Err(Failure::Interrupted(Fault::bare(
                "the daemon goes on exporting, and stops when it is done",
            )));
        }
    }
    // A stop that could not be clean leaves no checkpoint.
    let flash: Vec<std::path::PathBuf> = served.flash.iter().map(Into::into).collect();
    if Pool::look_at(&flash)?.info().state != "clean" {
        return Err(Error::unavailable(
            format!(
                "the daemon stopped, but the pool on {} was not left cleanly",
                plain(&served.flash.join(", "))
            ),
            "see its log, and export again with --flash",
        )
        .into());
    }
    exported(global)
}

/// A disk with clients.
fn used(client: &Client) -> Result<Option<DiskInfo>, Error> {
    let disks: Vec<DiskInfo> = client.get("/v1/disks")?;
    Ok(disks
        .into_iter()
        .find(|d| d.connections > 0 || !d.clients.is_empty()))
}

fn exported(global: &Global) -> Outcome {
    if global.json {
        return print_json(&Done { done: true });
    }
    println!("exported: everything is in the origins, and the pool is not in use any more");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_twice_is_told_with_and_without_a_lost_device() {
        assert_eq!(copies(1, false), "2 of what is dirty, 1 of what is clean");
        let lost = "2, and 1 now of what is dirty, 1 of what is clean";
        assert_eq!(copies(1, true), lost);
        // Pools that earlier versions made.
        assert_eq!(
            (copies(2, false), copies(2, true)),
            ("2".into(), "2, and 1 now".into())
        );
    }
}
