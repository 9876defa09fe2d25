//! `hearth datastore …`: clients of the control API.

mod scrub;

use hearth_daemon::api::advice::AdviceReport;
use hearth_daemon::api::datastores::{self as api, DatastoreInfo, DatastoreRemove, FileReport};
use hearth_daemon::api::types::{CacheMode, Done};
use hearth_daemon::client::{Client, datastore_path};
use hearth_daemon::error::Error;
use hearth_daemon::settings::SettingsChanged;
use hearth_daemon::size::human;
use hearth_fault::Fault;

use crate::args::{Datastore, DatastoreAdd, DatastoreSet, Global, Switch};
use crate::follow::follow;
use crate::interrupt::Interrupt;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json};

/// Files of which `show` tells what flash does for them.
const GAINS_MAX: usize = 10;

pub fn run(global: &Global, command: Datastore) -> Outcome {
    let client = Client::new(&global.dir());
    match command {
        Datastore::Add(args) => add(global, &client, args),
        Datastore::List => list(global, &client),
        Datastore::Show(args) => show(global, &client, &args.name),
        Datastore::Files(args) => files(global, &client, &args.name),
        Datastore::Set(args) => set(global, &client, args),
        Datastore::Flush(args) => {
            let interrupt = Interrupt::watch();
            if args.hold {
                // First: what is answered between the two must not be on flash only.
                let body = api::DatastoreSet {
                    hold: Some(true),
                    ..api::DatastoreSet::default()
                };
                client.patch::<_, DatastoreInfo>(&datastore_path(&args.name, ""), &body)?;
            }
            client.order::<DatastoreInfo>(&datastore_path(&args.name, "/flush"))?;
            let info = flushed(global, &client, &interrupt, &args.name)?;
            said(global, &info, "the directory has everything")
        }
        Datastore::Scrub(args) => scrub::run(global, &client, &args),
        Datastore::Remove(args) => {
            let interrupt = Interrupt::watch();
            client.order::<DatastoreInfo>(&datastore_path(&args.name, "/flush"))?;
            flushed(global, &client, &interrupt, &args.name)?;
            let how = DatastoreRemove { yes: args.yes };
            let done: Done = client.post(&datastore_path(&args.name, "/remove"), &how)?;
            if global.json {
                return print_json(&done);
            }
            println!("datastore {} is served no longer", plain(&args.name));
            Ok(())
        }
    }
}

/// Waits until everything is in the directory.
fn flushed(
    global: &Global,
    client: &Client,
    interrupt: &Interrupt,
    name: &str,
) -> Result<DatastoreInfo, Failure> {
    let call_off = || {
        Failure::Interrupted(Fault::new(
            format!("no longer waiting for datastore {name}"),
            "what is only on flash is still being written to its directory",
        ))
    };
    follow(global, interrupt, call_off, |line| {
        let info: DatastoreInfo = client.get(&datastore_path(name, ""))?;
        if !info.flushing {
            return Ok(Some(info));
        }
        line.show(|| format!("{} to go", human(info.dirty)));
        Ok(None)
    })
}

fn absolute(path: &std::path::Path) -> Result<std::path::PathBuf, Failure> {
    let made = std::path::absolute(path);
    Ok(made.map_err(|e| {
        Error::invalid(
            format!("{} cannot be made absolute: {e}", path.display()),
            "give an absolute path",
        )
    })?)
}

fn add(global: &Global, client: &Client, args: DatastoreAdd) -> Outcome {
    let (named, directory, mirror) = match &args.mirrors[..] {
        [] => (args.name, absolute(&args.directory)?, None),
        [a, b] => (
            args.directory.to_str().map(str::to_owned),
            absolute(a)?,
            Some(absolute(b)?),
        ),
        mirrors => {
            return Err(Error::invalid(
                format!(
                    "a mirrored datastore has two directories, and not {}",
                    mirrors.len()
                ),
                "write `hearth datastore add NAME --mirror DIR --mirror DIR --nfs`",
            )
            .into());
        }
    };
    let own = directory.file_name().and_then(|name| name.to_str());
    let Some(name) = named.or_else(|| own.map(str::to_owned)) else {
        return Err(Error::invalid(
            format!("{} has no name of its own", directory.display()),
            "choose one with --name",
        )
        .into());
    };
    let body = api::DatastoreAdd {
        name,
        directory: directory.display().to_string(),
        mirror: mirror.map(|path| path.display().to_string()),
        listen: args.listen,
        clients: (!args.clients.is_empty()).then_some(args.clients),
        read_only: args.read_only,
    };
    let info: DatastoreInfo = client.post("/v1/datastores", &body)?;
    if global.json {
        return print_json(&info);
    }
    println!(
        "datastore {} added: {}, served over NFS on {}",
        plain(&info.name),
        plain(&info.directory),
        plain(&info.listen)
    );
    tell_opened(&info);
    warn(&info);
    println!(
        "`hearth attach-help {} --for linux` (or esxi, proxmox) prints how to mount it",
        plain(&info.name)
    );
    Ok(())
}

fn set(global: &Global, client: &Client, args: DatastoreSet) -> Outcome {
    let rule = args.pattern.map(|pattern| api::FileRule {
        pattern,
        pin: args.pin.map(|switch| switch == Switch::On),
        scratch: args.scratch.map(|switch| switch == Switch::On),
        settings: SettingsChanged {
            mode: args.mode.map(CacheMode::from),
            block_size: args.block_size.map(|size| size.0),
            max: args.max.map(|size| size.0),
            seq_cutoff: args.seq_cutoff.map(|size| size.0),
            ..SettingsChanged::default()
        },
    });
    let opens = !args.clients.is_empty();
    let body = api::DatastoreSet {
        rule,
        unmatch: args.unmatch,
        listen: args.listen,
        clients: (!args.clients.is_empty()).then_some(args.clients),
        read_only: args.read_only.map(|switch| switch == Switch::On),
        hold: args.hold.map(|switch| switch == Switch::On),
    };
    let info: DatastoreInfo = client.patch(&datastore_path(&args.name, ""), &body)?;
    said(global, &info, "changed")?;
    if opens && !global.json {
        tell_opened(&info);
    }
    Ok(())
}

/// Tells which clients may use a datastore, as whom and from where.
fn tell_opened(info: &DatastoreInfo) {
    for client in &info.clients {
        println!("{}", plain(&client.opened()));
    }
}

/// A rule as one gives it.
fn told(rule: &api::FileRule) -> String {
    let settings = &rule.settings;
    let sizes = [
        ("block-size", settings.block_size),
        ("max", settings.max),
        ("seq-cutoff", settings.seq_cutoff),
    ];
    let mode = settings.mode.map(|mode| format!(" --mode {}", mode.word()));
    let sizes = sizes
        .into_iter()
        .filter_map(|(name, size)| Some(format!(" --{name} {}", human(size?))));
    let flags = [("pin", rule.pin), ("scratch", rule.scratch)];
    let flags = flags.into_iter().filter_map(|(name, on)| {
        Some(match on? {
            true => format!(" --{name}"),
            false => format!(" --{name}=off"),
        })
    });
    let settings: String = mode.into_iter().chain(sizes).chain(flags).collect();
    format!("{}:{settings}", rule.pattern)
}

/// Tells that something was done.
fn said(global: &Global, info: &DatastoreInfo, what: &str) -> Outcome {
    if global.json {
        return print_json(info);
    }
    println!("datastore {}: {what}", plain(&info.name));
    warn(info);
    Ok(())
}

/// What somebody should know of it, on standard error.
fn warn(info: &DatastoreInfo) {
    for notice in &info.notices {
        eprintln!("{}: {}", plain(&info.name), plain(notice));
    }
    if let Some(reason) = &info.reason {
        let remedy = info.remedy.as_deref().unwrap_or_default();
        eprintln!(
            "{} is not served: {}: {}",
            plain(&info.name),
            plain(reason),
            plain(remedy)
        );
    }
}

/// How a tree is, in a line.
fn tree_told(tree: &api::TreeInfo) -> String {
    let missing = match tree.missing {
        Some(0) => String::new(),
        Some(missing) => format!(", {missing} places to go"),
        None => ", everything to go".to_owned(),
    };
    let why = tree.reason.as_ref().map(|why| format!(": {why}"));
    let why = why.unwrap_or_default();
    format!("{} {}{missing}{why}", tree.directory, tree.state)
}

fn state(info: &DatastoreInfo) -> &'static str {
    match (info.served, info.read_only) {
        (false, _) => "not served",
        (true, true) => "read-only",
        (true, false) => "served",
    }
}

fn list(global: &Global, client: &Client) -> Outcome {
    let stores: Vec<DatastoreInfo> = client.get("/v1/datastores")?;
    if global.json {
        return print_json(&stores);
    }
    if stores.is_empty() {
        println!("no datastores; add one with `hearth datastore add DIRECTORY --nfs`");
        return Ok(());
    }
    let mut table = Table::new(&["NAME", "STATE", "LISTEN", "DIRECTORY"]);
    for info in &stores {
        table.row([
            plain(&info.name),
            state(info).to_owned(),
            plain(&info.listen),
            plain(&info.directory),
        ]);
    }
    print!("{}", table.render());
    stores.iter().for_each(warn);
    Ok(())
}

fn files(global: &Global, client: &Client, name: &str) -> Outcome {
    let files: Vec<FileReport> = client.get(&datastore_path(name, "/files"))?;
    if global.json {
        return print_json(&files);
    }
    if files.is_empty() {
        println!("no file of datastore {} is cached yet", plain(name));
        return Ok(());
    }
    let mut table = Table::new(&[
        "FILE", "SIZE", "MODE", "CACHED", "DIRTY", "READS", "HIT", "WRITES", "READ", "HELP", "PIN",
    ]);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for file in &files {
        let (counters, ratios) = (&file.counters, &file.ratios);
        table.row([
            plain(&file.path),
            human(file.size),
            match file.scratch {
                true => "scratch".to_owned(),
                false => file.mode.word().to_owned(),
            },
            human(file.cached),
            human(file.dirty),
            counters.reads().to_string(),
            or_none(
                ratios
                    .read_hit_ratio
                    .map(|hit| format!("{:.1} %", hit * 100.0)),
            ),
            counters.writes().to_string(),
            or_none(ratios.read_mean_us.map(|us| format!("{us:.0} µs"))),
            or_none(ratios.speedup.map(|times| format!("{times:.1}x"))),
            or_none(file.pin.map(|pin| pinned(pin, file))),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}

/// How far a file is that is to be all on flash.
fn pinned(pin: api::PinState, file: &FileReport) -> String {
    match pin {
        api::PinState::Filled => "all".to_owned(),
        api::PinState::NoRoom => "no room".to_owned(),
        api::PinState::Waiting => "waiting".to_owned(),
        api::PinState::Filling => {
            let share = file.cached as f64 / file.size.max(1) as f64;
            format!("{:.0} %", share.min(0.99) * 100.0)
        }
    }
}

/// What the files that are used would gain from other sizes, in lines.
fn gains(client: &Client, name: &str) -> Result<String, Error> {
    let report: AdviceReport = client.get(&datastore_path(name, "/advice"))?;
    let told = report.files.iter().filter(|a| a.reason.is_none());
    let told: Vec<_> = told.take(GAINS_MAX).collect();
    if told.is_empty() {
        return Ok(String::new());
    }
    Ok(format!(
        "\nwhat flash does for files in use (`hearth advise {}/` for all):\n{}",
        plain(name),
        crate::advise::table("FILE", &told)
    ))
}

fn show(global: &Global, client: &Client, name: &str) -> Outcome {
    let info: DatastoreInfo = client.get(&datastore_path(name, ""))?;
    if global.json {
        return print_json(&info);
    }
    let clients: Vec<String> = info.clients.iter().map(ToString::to_string).collect();
    let rows = [
        ("name", plain(&info.name)),
        ("state", state(&info).to_owned()),
        ("directory", plain(&info.directory)),
        ("mounted as", plain(&info.path)),
        ("listens on", plain(&info.listen)),
        (
            "portmapper",
            if info.portmapper { "yes" } else { "no" }.to_owned(),
        ),
        (
            "locks",
            match info.locks {
                true => "yes",
                false => "no; Linux mounts it with nolock",
            }
            .to_owned(),
        ),
        ("clients", plain(&clients.join(" "))),
        (
            "cached files",
            format!("{}, {} of them in use", info.disks, info.open),
        ),
        ("dirty", human(info.dirty)),
        ("held", if info.hold { "yes" } else { "no" }.to_owned()),
    ];
    for (what, value) in rows {
        println!("{what:<14}{value}");
    }
    for tree in &info.trees {
        println!("{:<14}{}", "tree", plain(&tree_told(tree)));
    }
    if let Some(scrub) = &info.scrub {
        println!("{:<14}{}", "scrub", scrub::sentence(scrub));
    }
    for rule in &info.rules {
        println!("{:<14}{}", "files like", plain(&told(rule)));
    }
    print!("{}", gains(client, name)?);
    warn(&info);
    Ok(())
}
