//! `hearth swap`: swap of this host on the flash. The daemon is not in the way of a page; what is inside a pool it sets aside, and takes
//! back, when it is asked to.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_daemon::api::areas::{AreaBack, AreaInfo, AreaWanted, AreasState};
use hearth_daemon::api::swap::{Endurance, SwapInfo, SwapTraffic};
use hearth_daemon::api::types::{Done, PoolInfo};
use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use hearth_daemon::pool::of_device;
use hearth_daemon::size::human;
use hearth_fault::Fault;
use hearth_swap::areas::Shown;
use hearth_swap::kernel;
use hearth_swap::tuning::{self, Setting};
use hearth_swap::{Areas, Lender, Lent, Request, Uuid};
use serde::Serialize;

use crate::args::{self, Global, SwapOn, SwapState};
use crate::interrupt::Interrupt;
use crate::status::StatusLine;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json};

/// How often is looked how far it is.
const LOOK: Duration = Duration::from_millis(200);

pub fn run(global: &Global, command: args::Swap) -> Outcome {
    match command {
        args::Swap::On(args) => on(global, &args),
        args::Swap::Off(state) => off(global, &state),
        args::Swap::Show(state) => show(global, &open(&state)?),
        args::Swap::Resume(state) => resume(global, &state),
    }
}

fn wrong(fault: Fault) -> Failure {
    Failure::Error(Error::unavailable(fault.what, fault.remedy))
}

fn dir(state: &SwapState) -> PathBuf {
    let named = state.state_dir.clone();
    named.unwrap_or_else(hearth_daemon::rundir::default_state_dir)
}

fn open(state: &SwapState) -> Result<Areas, Failure> {
    Areas::open(&dir(state)).map_err(wrong)
}

fn open_to_change(state: &SwapState) -> Result<Areas, Failure> {
    Areas::open_to_change(&dir(state)).map_err(wrong)
}

/// The daemon, which has the pool.
struct Served {
    client: Client,
    /// On which device something is to be set aside.
    device: Option<PathBuf>,
}

impl Served {
    fn of(global: &Global, device: Option<&Path>) -> Served {
        Served {
            client: Client::new(&global.dir()),
            device: device.map(Path::to_owned),
        }
    }

    fn areas(&self) -> hearth_swap::Result<AreasState> {
        self.client.get("/v1/pool/areas").map_err(fault)
    }

    /// Follows a change to its end; with `Err` of nothing it was called off.
    fn follow(
        &self,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> hearth_swap::Result<Option<AreasState>> {
        let mut asked = false;
        loop {
            let state = self.areas()?;
            let Some(change) = &state.change else {
                return Ok(Some(state));
            };
            match change.stage.as_str() {
                "called-off" => return Ok(None),
                "failed" => {
                    let error = change.error.clone();
                    let (what, remedy) =
                        error.map_or_else(Default::default, |e| (e.error, e.remedy));
                    return Err(Fault::new(what, remedy));
                }
                _ => {}
            }
            if !goes_on(change.done, change.total) && !asked {
                asked = true;
                // Where it cannot be called off any more it ends soon.
                let _ = self.client.order::<Done>("/v1/pool/flash/cancel");
            }
            std::thread::sleep(LOOK);
        }
    }
}

fn fault(e: Error) -> Fault {
    Fault::new(e.what.clone(), e.remedy.clone())
}

fn lent_of(area: &AreaInfo) -> hearth_swap::Result<Lent> {
    let uuid = |text: &str| {
        Uuid::parse_str(text).map_err(|e| {
            Fault::new(
                format!("the daemon says {text}, which is no UUID: {e}"),
                "use the daemon's own version of this program",
            )
        })
    };
    Ok(Lent {
        flash: PathBuf::from(&area.path),
        pool: uuid(&area.pool)?,
        device: uuid(&area.device)?,
        offset: area.offset,
        bytes: area.bytes,
    })
}

impl Lender for Served {
    fn lend(
        &mut self,
        size: u64,
        goes_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> hearth_swap::Result<Option<Lent>> {
        let wanted = AreaWanted {
            bytes: size,
            path: self.device.as_ref().map(|p| p.display().to_string()),
        };
        let before = self.areas()?.areas;
        let _: AreasState = self.client.post("/v1/pool/areas", &wanted).map_err(fault)?;
        let Some(state) = self.follow(goes_on)? else {
            return Ok(None);
        };
        let known = |area: &AreaInfo| {
            before
                .iter()
                .any(|b| (&b.path, b.offset) == (&area.path, area.offset))
        };
        match state.areas.iter().find(|area| !known(area)) {
            Some(area) => lent_of(area).map(Some),
            None => Err(Fault::new(
                "the daemon began anew meanwhile, and nothing was set aside",
                "try again",
            )),
        }
    }

    fn take_back(&mut self, lent: &Lent) -> hearth_swap::Result<()> {
        let back = AreaBack {
            path: lent.flash.display().to_string(),
            offset: lent.offset,
        };
        let url = "/v1/pool/areas/give-back";
        let _: AreasState = self.client.post(url, &back).map_err(fault)?;
        self.follow(&mut |_, _| true)?;
        let left = self.lent()?;
        match left
            .iter()
            .any(|l| l.offset == lent.offset && l.flash == lent.flash)
        {
            false => Ok(()),
            true => Err(Fault::new(
                "the daemon ended before it was given back",
                "use `hearth swap off` once more when it runs",
            )),
        }
    }

    fn lent(&mut self) -> hearth_swap::Result<Vec<Lent>> {
        self.areas()?.areas.iter().map(lent_of).collect()
    }

    fn check(&mut self, lent: &Lent) -> hearth_swap::Result<()> {
        let found = of_device(&lent.flash).map_err(fault)?;
        let wrong = |what: &str| {
            Fault::new(
                format!("{} is not swapped to: {what}", lent.flash.display()),
                "`hearth swap off` forgets it; `hearth swap on --in-pool` makes new swap",
            )
        };
        if (found.pool, found.device) != (lent.pool, lent.device) {
            return Err(wrong("it is another flash device than it was"));
        }
        // The pool's first device has the list for all.
        let here = lent.offset..lent.offset.saturating_add(lent.bytes);
        match found.aside {
            Some(aside) if !aside.contains(&here) => {
                Err(wrong("nothing is set aside there any more"))
            }
            _ => Ok(()),
        }
    }
}

/// The flash file that was named, or the one that is served here; none where the pool is on a
/// device.
fn flash(global: &Global, args: &SwapOn) -> Result<Option<PathBuf>, Failure> {
    if let Some(path) = &args.flash {
        return Ok(Some(path.clone()));
    }
    let info: PoolInfo = Client::new(&global.dir()).get("/v1/pool").map_err(|e| {
        Error::unavailable(
            format!("no --flash is given, and the daemon cannot be asked: {e}"),
            "name the pool's flash file with --flash",
        )
    })?;
    let [one] = &info.flash[..] else {
        return Err(Error::invalid(
            "the pool is not on one flash file",
            "name one of them with --flash, or use --in-pool",
        )
        .into());
    };
    let path = PathBuf::from(one);
    // A path that leads nowhere from here says nothing of what the pool is on.
    let kind = match path.is_absolute() {
        true => std::fs::metadata(&path).map(|meta| meta.file_type()),
        false => Err(std::io::ErrorKind::NotFound.into()),
    };
    match kind {
        Ok(kind) => Ok((!kind.is_block_device()).then_some(path)),
        Err(e) => Err(Error::invalid(
            format!("the daemon's flash {one} cannot be looked at: {e}"),
            "name it with --flash, or use --in-pool for a part of the pool",
        )
        .into()),
    }
}

fn on(global: &Global, args: &SwapOn) -> Outcome {
    let discard = match args.discard {
        args::Discard::Off => kernel::Discard::Off,
        args::Discard::Once => kernel::Discard::Once,
        args::Discard::Pages => kernel::Discard::Pages,
    };
    if args.zswap && tuning::zswap().is_none() {
        return Err(Error::invalid(
            "this kernel has no zswap",
            "leave --zswap out, or use a kernel with it",
        )
        .into());
    }
    if args.encrypt {
        hearth_swap::crypt::available().map_err(wrong)?;
    }
    let flash = match args.in_pool {
        true => None,
        false => flash(global, args)?,
    };
    if args.encrypt && flash.is_some() {
        return Err(Error::invalid(
            "swap in a file beside the pool is not encrypted",
            "add --in-pool, or leave --encrypt out",
        )
        .into());
    }
    let mut areas = open_to_change(&args.state)?;
    let request = Request {
        size: args.size.0,
        priority: args.priority,
        discard,
        encrypt: args.encrypt,
        zswap: args.zswap,
    };
    make(
        global,
        &mut areas,
        &request,
        flash.as_deref(),
        args.device.as_deref(),
    )?;
    show(global, &areas)?;
    if !global.json && tuning::zswap() == Some(false) {
        println!(
            "zswap is off; `hearth swap off` and `hearth swap on --zswap` compress pages in memory first, so that fewer are written to the flash"
        );
    }
    Ok(())
}

/// Makes it beside a flash file, or else inside the pool, on this device or any.
fn make(
    global: &Global,
    areas: &mut Areas,
    request: &Request,
    flash: Option<&Path>,
    device: Option<&Path>,
) -> Result<(), Failure> {
    let interrupt = Interrupt::watch();
    // In a script it may wait for minutes, too.
    let mut line = StatusLine::new(!global.json)
        .quiet_for(Duration::from_secs(1))
        .lines_every(Duration::from_secs(10));
    let doing = match flash {
        Some(_) => "writing",
        None => "making room",
    };
    let mut goes_on = |done, all| {
        line.show(|| format!("{doing}: {} of {}", human(done), human(all)));
        !interrupt.hit()
    };
    let made = match flash {
        Some(flash) => areas.on(flash, request, &mut goes_on),
        None => {
            // As the daemon finds it, whose directory is another.
            let device =
                device.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
            let mut daemon = Served::of(global, device.as_deref());
            areas.on_in_pool(request, &mut daemon, &mut goes_on)
        }
    };
    line.end();
    match made.map_err(wrong)? {
        Some(_) => Ok(()),
        None => Err(Failure::Interrupted(Fault::bare(
            "called off; nothing was left",
        ))),
    }
}

fn off(global: &Global, state: &SwapState) -> Outcome {
    let mut areas = open_to_change(state)?;
    take_away(global, &mut areas)?;
    if global.json {
        return show(global, &areas);
    }
    println!("no swap of Hearth's is left, and what was set for it is as before");
    Ok(())
}

/// Reads back what is swapped out, and takes the areas away.
fn take_away(global: &Global, areas: &mut Areas) -> Result<(), Failure> {
    let before = areas.show().map_err(wrong)?;
    // The signal has to come to this thread, which waits in the kernel: the one that shows takes none.
    let _interrupt = Interrupt::watch();
    let done = AtomicBool::new(false);
    let gone = std::thread::scope(|scope| {
        if !global.json {
            scope.spawn(|| follow(&before, &done));
        }
        let gone = areas.off(&mut Served::of(global, None));
        done.store(true, Ordering::Release);
        gone
    });
    if !gone.map_err(wrong)? {
        return Err(Failure::Interrupted(Fault::bare(
            "called off; what was not read back yet is swapped out as before",
        )));
    }
    Ok(())
}

/// Shows how much is swapped out yet.
fn follow(areas: &[Shown], done: &AtomicBool) {
    block_signals();
    let mut line = StatusLine::new(true).quiet_for(Duration::from_secs(1));
    while !done.load(Ordering::Acquire) {
        let used = kernel::in_use().unwrap_or_default();
        let left = used
            .iter()
            .filter(|u| areas.iter().any(|a| a.noted.path == u.path));
        let left: u64 = left.map(|u| u.used).sum();
        line.show(|| format!("reading back: {} left", human(left)));
        std::thread::sleep(LOOK);
    }
}

fn block_signals() {
    // SAFETY: all zeros are a valid value; the set is filled by the call, and is ours.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

fn resume(global: &Global, state: &SwapState) -> Outcome {
    let mut areas = open_to_change(state)?;
    let told = areas.resume(&mut Served::of(global, None)).map_err(wrong)?;
    let mut failed = None;
    for (path, outcome) in told {
        match outcome {
            Ok(()) if !global.json => println!("{}", path.display()),
            Ok(()) => {}
            Err(fault) => {
                eprintln!("hearth: {fault}");
                failed = Some(fault);
            }
        }
    }
    if let Some(fault) = failed {
        return Err(wrong(fault));
    }
    if global.json {
        return show(global, &areas);
    }
    Ok(())
}

#[derive(Serialize)]
struct All<'a> {
    areas: &'a [Shown],
    /// Set aside in the pool, and no swap of this host.
    idle: &'a [AreaInfo],
    settings: &'a [Setting],
    /// Why the file among them cannot be read back.
    #[serde(skip_serializing_if = "Option::is_none")]
    trouble: Option<String>,
    /// What swap and the cache do on the flash that they share.
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic: Option<SwapTraffic>,
    /// What may be written there, and who wrote.
    #[serde(skip_serializing_if = "Option::is_none")]
    endurance: Option<Endurance>,
}

/// What the daemon sees of the flash that swap and the cache share. Without one there is nothing to be told.
fn shared(global: &Global) -> SwapInfo {
    let told: Result<SwapInfo, Error> = Client::new(&global.dir()).get("/v1/swap");
    told.unwrap_or_default()
}

/// The budget in words.
fn budget(of: &Endurance) -> String {
    format!(
        "of what may be written to the flash, {} a second in the long run, {:.0} % is used up lately; since the daemon started the cache wrote {}, and {} were swapped out",
        human(of.bytes_per_s),
        of.used * 100.0,
        human(of.cache_write_bytes),
        human(of.swap_write_bytes)
    )
}

/// The same in words.
fn told(traffic: &SwapTraffic) -> String {
    let us = |us: Option<u64>| us.map_or("-".to_owned(), |us| format!("{us} µs"));
    format!(
        "on the pool's flash, a second: swap reads {} and writes {}, the cache reads {} and writes {}; a page is back in {}, usually {}{}",
        human(traffic.swap_read_bytes_per_s),
        human(traffic.swap_write_bytes_per_s),
        human(traffic.cache_read_bytes_per_s),
        human(traffic.cache_write_bytes_per_s),
        us(traffic.latency_us),
        us(traffic.usual_latency_us),
        match traffic.cache_stands_back {
            true => "; the cache stands back",
            false => "",
        }
    )
}

/// What a pool that is served here has set aside, and is not noted here as used.
fn idle(global: &Global, shown: &[Shown]) -> Vec<AreaInfo> {
    let Ok(state) = Served::of(global, None).areas() else {
        return Vec::new();
    };
    let noted = |area: &AreaInfo| {
        let same = |l: &Lent| l.device.to_string() == area.device && l.offset == area.offset;
        shown
            .iter()
            .any(|s| s.noted.in_pool.as_ref().is_some_and(same))
    };
    state.areas.into_iter().filter(|a| !noted(a)).collect()
}

fn show(global: &Global, areas: &Areas) -> Outcome {
    let (shown, settings) = (areas.show().map_err(wrong)?, areas.settings());
    let idle = idle(global, &shown);
    let any = shown.iter().any(|s| s.on);
    let SwapInfo {
        traffic,
        endurance,
        trouble,
        ..
    } = if any {
        shared(global)
    } else {
        Default::default()
    };
    if global.json {
        return print_json(&All {
            areas: &shown,
            idle: &idle,
            settings,
            trouble,
            traffic,
            endurance,
        });
    }
    if let Some(trouble) = &trouble {
        println!("{}", plain(trouble));
    }
    for area in &idle {
        println!(
            "{} of {} are set aside, and this host does not swap to them; `hearth swap off` gives them back",
            human(area.bytes),
            plain(&area.path)
        );
    }
    if shown.is_empty() {
        println!("no swap; `hearth swap on --size 8G` makes some");
    } else {
        let mut table = Table::new(&["AREA", ">SIZE", ">SWAPPED OUT", ">PRIORITY", "STATE"]);
        for area in &shown {
            let path = area.noted.path.display();
            let name = match &area.noted.in_pool {
                None => path.to_string(),
                Some(lent) if area.noted.encrypted => {
                    format!("{path} in {}, encrypted", lent.flash.display())
                }
                Some(lent) => format!("{path} in {}", lent.flash.display()),
            };
            table.row([
                plain(&name),
                human(area.noted.size),
                human(area.used),
                area.noted.priority.to_string(),
                if area.on { "on" } else { "off" }.to_owned(),
            ]);
        }
        print!("{}", table.render());
    }
    if let Some(traffic) = &traffic {
        println!("{}", told(traffic));
    }
    if let Some(endurance) = &endurance {
        println!("{}", budget(endurance));
    }
    for Setting {
        path,
        before,
        now,
        why,
        ..
    } in settings
    {
        println!("set: {} {now} (was {before}): {why}", path.display());
    }
    Ok(())
}
