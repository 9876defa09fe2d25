//! `hearth disk …`: clients of the control API.

mod scrub;

use hearth_daemon::api::datastores::PinState;
use hearth_daemon::api::types::{self, DiskHome, DiskInfo, DiskState, PinInfo, PoolInfo};
use hearth_daemon::client::{Client, disk_path};
use hearth_daemon::error::{Error, Kind};
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_fault::Fault;
use hearth_io::OriginSpec;
use serde_json::json;

use crate::args::{
    Disk, DiskAdd, DiskMirror, DiskMove, DiskRemove, DiskReplace, DiskSet, Global, Users,
};
use crate::follow::follow;
use crate::interrupt::Interrupt;
use crate::status::StatusLine;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json};

pub fn run(global: &Global, command: Disk) -> Outcome {
    let client = Client::new(&global.dir());
    match command {
        Disk::Add(args) => add(global, &client, args),
        Disk::List => list(global, &client),
        Disk::Show(args) => show(global, &client.get(&disk_path(&args.name, ""))?),
        Disk::Set(args) => set(global, &client, &args),
        Disk::Flush(args) => {
            let interrupt = Interrupt::watch();
            let hold = |name: &str| match args.hold {
                // First: a write that is answered between the two must not be on flash only.
                true => client
                    .patch::<_, DiskInfo>(&disk_path(name, ""), &json!({ "hold": true }))
                    .map(drop),
                false => Ok(()),
            };
            let Some(name) = &args.name else {
                return flush_every(global, &client, &interrupt, hold);
            };
            hold(name)?;
            client.order::<DiskInfo>(&disk_path(name, "/flush"))?;
            reach(global, &client, &interrupt, name, Goal::Flush)
        }
        Disk::Remove(args) => remove(global, &client, &args),
        Disk::Mirror(args) => mirror(global, &client, &args),
        Disk::Replace(args) => replace(global, &client, &args),
        Disk::Move(args) => move_to(global, &client, &args),
        Disk::Scrub(args) => scrub::run(global, &client, &args),
        Disk::Reset(args) => {
            let info: DiskInfo = client.order(&disk_path(&args.name, "/reset"))?;
            said(global, &info, "empty")
        }
        Disk::AcceptLoss(args) => {
            let info: DiskInfo = client.order(&disk_path(&args.name, "/accept-loss"))?;
            said(
                global,
                &info,
                "the lost ranges are given up; they read as the origin has them",
            )
        }
    }
}

/// The origin as the daemon should see it: relative paths are relative to us, not to it.
pub fn absolute_origin(text: &str) -> Result<String, Error> {
    let mut spec: OriginSpec = text
        .parse()
        .map_err(hearth_daemon::origin::not_understood)?;
    hearth_origin::absolute(&mut spec).map_err(|e| {
        Error::invalid(
            format!("the origin's path in \"{text}\" cannot be made absolute: {e}"),
            "give an absolute path",
        )
    })?;
    Ok(spec.to_string())
}

/// A leg as it is written in a mirror.
fn leg_name(text: &str) -> Result<String, Error> {
    let leg: OriginSpec = absolute_origin(text)?
        .parse()
        .map_err(hearth_daemon::origin::not_understood)?;
    Ok(leg.to_string())
}

fn mirror(global: &Global, client: &Client, args: &DiskMirror) -> Outcome {
    let set = types::MirrorSet {
        add: args.add.as_deref().map(leg_name).transpose()?,
        remove: args.remove.as_deref().map(leg_name).transpose()?,
        paused: (args.pause || args.resume).then_some(args.pause),
        rate: args.rate.map(|rate| rate.0),
    };
    let info: DiskInfo = client.post(&disk_path(&args.name, "/mirror"), &set)?;
    show(global, &info)
}

fn move_to(global: &Global, client: &Client, args: &DiskMove) -> Outcome {
    let to = types::DiskMove {
        origin: args.origin.as_deref().map(absolute_origin).transpose()?,
        flash_only: args.flash_only,
    };
    let info: DiskInfo = client.post(&disk_path(&args.name, "/move"), &to)?;
    if args.flash_only {
        return said(
            global,
            &info,
            "what flash lacks of it is brought there in the background, which `hearth disk show` follows and `hearth disk flush` calls off; then it lives on this pool's flash and nowhere else, and is lost if that dies",
        );
    }
    said(
        global,
        &info,
        &format!(
            "its origin is {}; the {} that only flash has are written there in the background, which `hearth disk show` follows and `hearth disk flush` hurries",
            plain(&info.origin),
            human(info.dirty)
        ),
    )
}

/// Adds the new leg, waits until it holds the disk, and takes the old one out. One that is out already goes
/// first: the new one may have its name.
fn replace(global: &Global, client: &Client, args: &DiskReplace) -> Outcome {
    let (old, new) = (leg_name(&args.old)?, leg_name(&args.new)?);
    let path = disk_path(&args.name, "/mirror");
    let info: DiskInfo = client.get(&disk_path(&args.name, ""))?;
    let found = info.legs.iter().find(|leg| leg.origin == old);
    let Some(found) = found else {
        return Err(Error::invalid(
            format!("{old} is no leg of {}", args.name),
            format!("`hearth disk show {}` lists them", args.name),
        )
        .into());
    };
    let add = types::MirrorSet {
        add: Some(new.clone()),
        ..types::MirrorSet::default()
    };
    let remove = types::MirrorSet {
        remove: Some(old.clone()),
        ..types::MirrorSet::default()
    };
    let is_out = found.state == "out";
    // The same replacement was begun before, and this goes on with it.
    let is_begun = info.legs.iter().any(|leg| leg.origin == new);
    let interrupt = Interrupt::watch();
    if is_out {
        client.post::<_, DiskInfo>(&path, &remove)?;
    }
    if !is_begun {
        client.post::<_, DiskInfo>(&path, &add)?;
    }
    // A copy that is left behind would be one leg more each time that somebody tries.
    let call_off = || {
        let what = match is_out || is_begun {
            true => format!("called off; {new} is a leg and goes on being copied to"),
            false => {
                let back = types::MirrorSet {
                    remove: Some(new.clone()),
                    ..types::MirrorSet::default()
                };
                match client.post::<_, DiskInfo>(&path, &back) {
                    Ok(_) => format!("called off; {new} is taken out again"),
                    Err(error) => format!("called off, but {new} is a leg still: {}", error.what),
                }
            }
        };
        let remedy = format!("`hearth disk show {}` lists the legs", args.name);
        Failure::Interrupted(Fault::new(what, remedy))
    };
    let mut pace = Pace::default();
    follow(global, &interrupt, call_off, |line| {
        let info: DiskInfo = client.get(&disk_path(&args.name, ""))?;
        let leg = info.legs.iter().find(|leg| leg.origin == new);
        let Some(leg) = leg else {
            return Err(Error::conflict(
                format!("{new} is no leg any more"),
                format!("`hearth disk show {}` lists them", args.name),
            )
            .into());
        };
        line.show(|| format!("{}: {}", plain(&new), pace.text(leg)));
        Ok((leg.state == "current").then_some(()))
    })?;
    if !is_out {
        client.post::<_, DiskInfo>(&path, &remove)?;
    }
    said(
        global,
        &client.get(&disk_path(&args.name, ""))?,
        &format!("{} has taken the place of {}", plain(&new), plain(&old)),
    )
}

/// How fast a leg is being copied to.
#[derive(Default)]
struct Pace {
    first: Option<(std::time::Instant, u64)>,
}

impl Pace {
    fn text(&mut self, leg: &types::MirrorLeg) -> String {
        let (since, before) = *self
            .first
            .get_or_insert((std::time::Instant::now(), leg.copied));
        let speed =
            leg.copied.saturating_sub(before) as f64 / since.elapsed().as_secs_f64().max(0.1);
        let left = match speed >= 1.0 {
            true => format!(", {} left", human_seconds(leg.behind as f64 / speed)),
            false => String::new(),
        };
        format!(
            "{}, {} to copy, {}/s{left}",
            plain(&leg.state),
            human(leg.behind),
            human(speed as u64)
        )
    }
}

/// The origin of a new disk: one place, or several as a mirror.
fn origin_of(args: &DiskAdd) -> Result<String, Error> {
    if args.flash_only.is_some() {
        return Ok(String::new());
    }
    if let Some(origin) = &args.origin {
        return absolute_origin(origin);
    }
    let legs = args.mirror.iter().map(|leg| {
        let leg = absolute_origin(leg)?;
        leg.parse().map_err(hearth_daemon::origin::not_understood)
    });
    Ok(hearth_origin::mirror(
        &legs.collect::<Result<Vec<_>, Error>>()?,
    ))
}

/// A takeover wants to be meant.
fn check_takeover(users: &Users) -> Result<(), Error> {
    if users.takeover && !users.yes {
        return Err(Error::refused(
            "--takeover gives up what the origin's owner has on its flash and has not written back: \
             writes that its guests were told are safe may be missing, and a guest that still runs \
             there must not go on",
            "bring that host back and remove the disk there, or add --yes if it is gone for good",
        ));
    }
    Ok(())
}

fn add(global: &Global, client: &Client, args: DiskAdd) -> Outcome {
    check_takeover(&args.users)?;
    let origin = origin_of(&args)?;
    let body: types::DiskAdd = args.settings.body(json!({
        "name": args.name,
        "origin": origin,
        "flash_only": args.flash_only.map(|size| size.0),
        "scratch": args.scratch,
        "sole_user": args.users.sole_user,
        "takeover": args.users.takeover,
        "allow_backing": args.allow_backing,
    }))?;
    let info: DiskInfo = client.post("/v1/disks", &body)?;
    if global.json {
        return print_json(&info);
    }
    println!(
        "disk {} added: {}, {}",
        plain(&info.name),
        human(info.size),
        home_text(&info)
    );
    if info.home != DiskHome::Origin {
        warn(&[format!(
            "note: the data of {} is on this pool's flash and nowhere else; if the flash device dies, it is lost (with two copies: if both devices die){}",
            plain(&info.name),
            match info.home {
                DiskHome::Scratch => ", and a crash of the host or the daemon loses its contents",
                _ => "",
            }
        )]);
    }
    warn(&notices(&info));
    let socket = hearth_daemon::rundir::nbd_socket(&global.dir());
    let socket = std::path::absolute(&socket).unwrap_or(socket);
    println!(
        "attach it with nbd+unix:///{}?socket={}",
        plain(&info.name),
        socket.display()
    );
    Ok(())
}

/// How a disk is cached, or that it is not.
fn home_text(info: &DiskInfo) -> String {
    match info.home {
        DiskHome::Origin => info.settings.mode.word().to_owned(),
        DiskHome::Flash => "on flash alone".to_owned(),
        DiskHome::Scratch => "on flash alone, scratch".to_owned(),
        DiskHome::Moving if info.onto_flash.is_some() => {
            format!("{}, moving onto flash", info.settings.mode.word())
        }
        DiskHome::Moving => format!("{}, moving off flash", info.settings.mode.word()),
    }
}

/// How far a disk is on its way onto flash.
fn going_text(going: &types::OntoFlash) -> String {
    let left = going.bytes_left.map_or("all of it".to_owned(), human);
    let eta = going.eta_seconds;
    let eta = eta.map_or(String::new(), |s| format!(", {s:.0} s at this rate"));
    format!("onto flash, {left} to be looked at yet{eta}")
}

/// What somebody should know of a disk, besides what was asked for.
fn notices(info: &DiskInfo) -> Vec<String> {
    let notes = info.notices.iter().map(|n| format!("note: {}", plain(n)));
    let reason = reason(info).map(|why| plain(&why.to_string()));
    notes
        .chain(reason.map(|why| format!("{}: {why}", info.state.word())))
        .collect()
}

/// Why a disk is not as it should be, and what to do about it.
fn reason(info: &DiskInfo) -> Option<Fault> {
    let why = info.reason.clone()?;
    Some(Fault::new(why, info.remedy.clone().unwrap_or_default()))
}

/// On standard error: on standard output is what was asked for, perhaps read by a program.
fn warn(lines: &[String]) {
    for line in lines {
        eprintln!("{line}");
    }
}

/// How a leg of a mirror is.
fn leg_text(leg: &types::MirrorLeg) -> String {
    match (leg.state.as_str(), &leg.reason) {
        ("out", Some(why)) => format!("out ({})", plain(why)),
        ("resyncing" | "checking", _) => format!("{}, {} left", leg.state, human(leg.behind)),
        (state, _) => plain(state),
    }
}

/// What a disk is doing, and whether something is wrong meanwhile.
fn state_text(d: &DiskInfo) -> String {
    let state = d.state.word();
    match &d.cannot_write_back {
        Some(trouble) => format!("{state} (cannot write back: {})", plain(&trouble.error)),
        None => state.to_owned(),
    }
}

/// What of a disk its origin does not have yet, if anybody knows.
fn dirty_text(d: &DiskInfo) -> String {
    match d.dirty_unknown {
        true => "unknown".to_owned(),
        false => human(d.dirty),
    }
}

/// What is lost of a disk, and what to do.
fn lost_text(d: &DiskInfo) -> String {
    format!(
        "{}; reading them fails until they are written again or given up with `hearth disk \
         accept-loss {}`",
        types::lost_sentence(&d.lost),
        plain(&d.name)
    )
}

fn list(global: &Global, client: &Client) -> Outcome {
    let disks: Vec<DiskInfo> = client.get("/v1/disks")?;
    if global.json {
        return print_json(&disks);
    }
    if disks.is_empty() {
        println!("no disks; add one with `hearth disk add NAME --origin PATH`");
        return Ok(());
    }
    let mut table = Table::new(&[
        "NAME", "STATE", "MODE", ">SIZE", ">CACHED", ">DIRTY", ">CLIENTS", "ORIGIN",
    ]);
    for d in &disks {
        table.row([
            plain(&d.name),
            state_text(d),
            d.settings.mode.word().to_owned(),
            human(d.size),
            human(d.cached),
            dirty_text(d),
            d.connections.to_string(),
            match d.home {
                DiskHome::Origin | DiskHome::Moving => plain(&d.origin),
                _ => home_text(d),
            },
        ]);
    }
    print!("{}", table.render());
    for d in &disks {
        if let Some(why) = reason(d) {
            eprintln!(
                "{} is {}: {}",
                plain(&d.name),
                d.state.word(),
                plain(&why.to_string())
            );
        }
        for notice in &d.notices {
            eprintln!("{}: {}", plain(&d.name), plain(notice));
        }
        if !d.lost.is_empty() {
            eprintln!("{}: {}", plain(&d.name), lost_text(d));
        }
    }
    Ok(())
}

/// A setting in seconds: exact below a minute, from there on as everywhere.
fn span(seconds: f64) -> String {
    match seconds < 60.0 {
        true => format!("{seconds} s"),
        false => human_seconds(seconds),
    }
}

/// How far a pinned disk is, in words.
fn pin_text(pinned: &PinInfo) -> String {
    let text = match pinned.state {
        PinState::Filled => "all of it is on flash".to_owned(),
        PinState::NoRoom => "not so much flash can be kept for it".to_owned(),
        PinState::Waiting => "it is not read in just now".to_owned(),
        PinState::Filling => format!(
            "being read in, {} left, {}/s{}",
            human(pinned.bytes_left.unwrap_or(0)),
            human(pinned.bytes_per_second as u64),
            pinned
                .eta_seconds
                .map_or_else(String::new, |eta| format!(", {}", human_seconds(eta)))
        ),
    };
    match &pinned.reason {
        Some(reason) => {
            let remedy = pinned.remedy.clone().unwrap_or_default();
            format!("{text}: {}", plain(&Fault::new(reason, remedy).to_string()))
        }
        None => text,
    }
}

fn show(global: &Global, d: &DiskInfo) -> Outcome {
    if global.json {
        return print_json(d);
    }
    let limit = |bytes: u64, none: &str| {
        if bytes == 0 {
            none.to_owned()
        } else {
            human(bytes)
        }
    };
    let mut table = Table::new(&["disk", &plain(&d.name)]);
    let mut line = |key: &str, value: String| table.row([key.to_owned(), value]);
    line("state", state_text(d));
    match d.home {
        DiskHome::Origin | DiskHome::Moving if d.legs.is_empty() => {
            line("origin", plain(&d.origin));
        }
        DiskHome::Origin | DiskHome::Moving => {}
        _ => line("lives", home_text(d)),
    }
    for (i, leg) in d.legs.iter().enumerate() {
        let key = if i == 0 { "mirror" } else { "" };
        line(key, format!("{}: {}", plain(&leg.origin), leg_text(leg)));
    }
    if let Some(upkeep) = &d.upkeep {
        for (key, text) in scrub::lines(upkeep, d.size) {
            line(key, text);
        }
    }
    for file in &d.chain {
        line("lies on", plain(file));
    }
    if !d.device.is_empty() {
        line("device", plain(&d.device));
    }
    if let Some(check) = d.check {
        line(
            "cache check",
            format!(
                "{} of {} cached blocks were compared with the origin; until that ends, reads come from the origin and nothing is written back",
                check.compared, check.cached
            ),
        );
    }
    line("size", format!("{} ({} bytes)", human(d.size), d.size));
    line("mode", d.settings.mode.word().to_owned());
    if let Some(order) = &d.order {
        line("in order", order.sentence());
    }
    if d.settings.max_age > 0.0 {
        line("behind at most", span(d.settings.max_age));
    }
    line("block size", human(d.settings.block_size));
    line("flash kept", limit(d.settings.min, "none"));
    if let Some(pinned) = &d.pinned {
        line("pinned", pin_text(pinned));
    }
    if let Some(share) = d.share {
        line("as advised", human(share));
    } else if d.settings.auto {
        line("as advised", "nothing yet".to_owned());
    }
    line("flash limit", limit(d.settings.max, "none"));
    line("seq cutoff", limit(d.settings.seq_cutoff, "none"));
    line(
        "read-only",
        if d.settings.read_only { "yes" } else { "no" }.to_owned(),
    );
    if let Some(going) = &d.onto_flash {
        line("moving", going_text(going));
    } else if d.home == DiskHome::Moving {
        line(
            "moving",
            format!("{} are to be written to the origin", human(d.dirty)),
        );
    }
    line("cached", human(d.cached));
    line("dirty", dirty_text(d));
    line(
        "clients",
        match d.settings.clients {
            0 => d.clients.len().to_string(),
            limit => format!("{}, at most {limit} at a time", d.clients.len()),
        },
    );
    for client in &d.clients {
        line("", client_text(client));
    }
    if let Some(link) = &d.link {
        line("origin link", link_text(link));
        line("origin limit", span(link.timeout));
    }
    if let Some(r) = d.recording.as_ref().filter(|r| r.active) {
        line("recording", crate::record::sentence(r));
    }
    print!("{}", table.render());
    for range in &d.stranded {
        println!(
            "stranded on flash: {} bytes at offset {}",
            range.length, range.offset
        );
    }
    for range in &d.lost {
        println!("lost: {} bytes at offset {}", range.length, range.offset);
    }
    if !d.lost.is_empty() {
        println!("{}", lost_text(d));
    }
    for line in notices(d) {
        println!("{line}");
    }
    Ok(())
}

fn client_text(client: &types::ClientInfo) -> String {
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH);
    let seconds = now.map_or(0, |now| now.as_secs().saturating_sub(client.since));
    let connections = match client.connections {
        1 => String::new(),
        n => format!(", {n} connections"),
    };
    format!(
        "{}: {}, for {}{connections}{}",
        plain(&client.kind),
        plain(&hearth_daemon::clients::sentence(std::slice::from_ref(
            client
        ))),
        human_seconds(seconds as f64),
        if client.writes { ", writes" } else { "" }
    )
}

fn link_text(link: &types::OriginLink) -> String {
    let since = human_seconds(link.seconds);
    let again = match link.reconnects {
        0 => String::new(),
        n => format!(", lost and found again {n} times"),
    };
    if link.connected {
        return format!("connected for {since}{again}");
    }
    let what = if link.failing { "fail" } else { "wait" };
    format!(
        "not connected for {since}, {} attempts; requests {what}{again}",
        link.attempts
    )
}

fn said(global: &Global, info: &DiskInfo, text: &str) -> Outcome {
    if global.json {
        return print_json(info);
    }
    println!("disk {}: {text}", plain(&info.name));
    warn(&notices(info));
    Ok(())
}

fn set(global: &Global, client: &Client, args: &DiskSet) -> Outcome {
    check_takeover(&args.users)?;
    let others = match args.no_pin {
        true => json!({ "pin": false }),
        false => json!({}),
    };
    let body = types::DiskSet {
        size: args.size.map(|size| size.0),
        size_from_origin: args.size_from_origin,
        allow_backing: args.allow_backing,
        trust: args.trust.map(Into::into),
        sole_user: args.users.sole_user,
        takeover: args.users.takeover,
        ..args.settings.clone().body(others)?
    };
    let before = match args.size_from_origin {
        true => Some(client.get::<DiskInfo>(&disk_path(&args.name, ""))?.size),
        false => None,
    };
    let info: DiskInfo = client.patch(&disk_path(&args.name, ""), &body)?;
    let unchanged = if before == Some(info.size) {
        "; the origin has the size it had, nothing changed"
    } else {
        ""
    };
    said(
        global,
        &info,
        &format!("{}, {}{unchanged}", human(info.size), home_text(&info)),
    )
}

fn remove(global: &Global, client: &Client, args: &DiskRemove) -> Outcome {
    let path = disk_path(&args.name, "");
    let info: DiskInfo = client.get(&path)?;
    if args.discard_dirty && !args.yes {
        return Err(Error::refused(
            format!(
                "--discard-dirty would lose the {} of {} that are only on flash",
                human(match info.home {
                    DiskHome::Origin | DiskHome::Moving => info.dirty,
                    _ => info.cached,
                }),
                args.name
            ),
            "add --yes if that is what you want, or leave --discard-dirty out",
        )
        .into());
    }
    if args.yes && info.connections > 0 && !global.json {
        eprintln!(
            "note: {} client(s) connected to {}; they are cut off at the end",
            info.connections,
            plain(&info.name)
        );
    }
    let body = types::DiskRemove {
        discard_dirty: args.discard_dirty,
        yes: args.yes,
    };
    let interrupt = Interrupt::watch();
    client.post::<_, DiskInfo>(&disk_path(&args.name, "/remove"), &body)?;
    reach(global, client, &interrupt, &args.name, Goal::Remove)
}

/// Flushes every disk that can be, one after the other.
/// Flushes all disks that are served, one after another; names those that are not served.
fn flush_every(
    global: &Global,
    client: &Client,
    interrupt: &Interrupt,
    hold: impl Fn(&str) -> Result<(), Error>,
) -> Outcome {
    let disks: Vec<DiskInfo> = client.get("/v1/disks")?;
    let is_served = |d: &&DiskInfo| d.state == DiskState::Attached;
    for disk in disks.iter().filter(is_served) {
        hold(&disk.name)?;
        client.order::<DiskInfo>(&disk_path(&disk.name, "/flush"))?;
        wait_for(global, client, interrupt, &disk.name, Goal::Flush)?;
        if !global.json {
            println!("disk {}: flushed", plain(&disk.name));
        }
    }
    if global.json {
        print_json(&client.get::<Vec<DiskInfo>>("/v1/disks")?)?;
    }
    let left: Vec<String> = (disks.iter().filter(|d| !is_served(d)))
        .map(|d| format!("{} ({})", plain(&d.name), d.state.word()))
        .collect();
    if left.is_empty() {
        return Ok(());
    }
    Err(Error::conflict(
        format!("not flushed, as they are not served: {}", left.join(", ")),
        "`hearth disk list` says why",
    )
    .into())
}

pub fn flush_all(global: &Global, client: &Client, interrupt: &Interrupt) -> Outcome {
    let disks: Vec<DiskInfo> = client.get("/v1/disks")?;
    for disk in disks
        .iter()
        .filter(|d| d.state == DiskState::Attached && d.dirty > 0)
    {
        client.order::<DiskInfo>(&disk_path(&disk.name, "/flush"))?;
        wait_for(global, client, interrupt, &disk.name, Goal::Flush)?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Goal {
    Flush,
    Remove,
}

impl Goal {
    fn word(self) -> &'static str {
        match self {
            Goal::Flush => "flush",
            Goal::Remove => "removal",
        }
    }
}

/// What keeps a flush from its end is said once, when it is first seen.
#[derive(Default)]
struct Told {
    trouble: bool,
    lost: bool,
}

impl Told {
    fn tell(&mut self, line: &mut StatusLine, info: &DiskInfo) {
        if let (false, Some(trouble)) = (self.trouble, &info.cannot_write_back) {
            self.trouble = true;
            line.end();
            eprintln!(
                "note: {} cannot be written back at the moment: {}; this waits until the origin takes writes \
                 again (Ctrl-C calls it off)",
                plain(&info.name),
                plain(&trouble.error)
            );
        }
        if !self.lost && !info.lost.is_empty() {
            self.lost = true;
            line.end();
            eprintln!("note: {}: {}", plain(&info.name), lost_text(info));
        }
    }
}

/// Shows progress until the goal is reached, and says so; Ctrl-C calls it off.
fn reach(
    global: &Global,
    client: &Client,
    interrupt: &Interrupt,
    name: &str,
    goal: Goal,
) -> Outcome {
    wait_for(global, client, interrupt, name, goal)?;
    if global.json {
        return print_json(&types::Done { done: true });
    }
    let done = if goal == Goal::Flush {
        "flushed"
    } else {
        "removed"
    };
    println!("disk {}: {done}", plain(name));
    Ok(())
}

fn wait_for(
    global: &Global,
    client: &Client,
    interrupt: &Interrupt,
    name: &str,
    goal: Goal,
) -> Outcome {
    let mut told = Told::default();
    let call_off = || call_off(client, name, goal);
    follow(global, interrupt, call_off, |line| {
        let info: DiskInfo = match client.get(&disk_path(name, "")) {
            Ok(info) => info,
            Err(e) if e.kind == Kind::NotFound && goal == Goal::Remove => return Ok(Some(())),
            Err(e) => return Err(e.into()),
        };
        if !global.json {
            told.tell(line, &info);
        }
        show_progress(line, &info);
        let busy = matches!(info.state, DiskState::Flushing | DiskState::Removing);
        if busy {
            return Ok(None);
        }
        match (goal, info.progress) {
            (Goal::Flush, Some(p)) if p.done => Ok(Some(())),
            _ => {
                let why = reason(&info);
                let why = info
                    .incomplete
                    .map(|e| Fault::new(e.error, e.remedy))
                    .or(why);
                let why = why.unwrap_or_else(|| Fault::new("somebody called it off", "try again"));
                let whole = format!("the {} of {name} did not complete", goal.word());
                Err(Error::of(Kind::Conflict, why.within(whole)).into())
            }
        }
    })
}

fn call_off(client: &Client, name: &str, goal: Goal) -> Failure {
    match client.order::<DiskInfo>(&disk_path(name, "/cancel")) {
        Ok(info) => {
            let flash = client.get::<PoolInfo>("/v1/pool").map(|pool| pool.state);
            Failure::Interrupted(Fault::bare(called_off_text(&info, flash.as_deref().ok())))
        }
        // It was done before we could call it off.
        Err(e) if e.kind == Kind::NotFound && goal == Goal::Remove => Failure::Interrupted(
            Fault::bare(format!("{name} was removed before it could be called off")),
        ),
        Err(e) => Failure::Error(e),
    }
}

/// What threatens what waits on flash in this state.
fn flash_threat(flash: Option<&str>) -> Option<&'static str> {
    match flash {
        None => Some("Hearth did not say whether the flash still works"),
        Some("failed") => Some(
            "the flash has failed, and only writing it back shows whether all of that can still be read: flush again",
        ),
        Some("leaving") => Some(
            "the flash file was removed, and what is only there when Hearth ends is lost: flush again",
        ),
        Some(_) => None,
    }
}

/// What is so after a flush or a removal was called off, with the flash in this state.
fn called_off_text(info: &DiskInfo, flash: Option<&str>) -> String {
    let name = plain(&info.name);
    let lost: u64 = info.lost.iter().map(|r| r.length).sum();
    let kept = info.dirty.saturating_sub(lost);
    let mut text = match kept {
        0 => format!("called off; nothing of {name} waits on flash"),
        kept => format!(
            "called off; {} of {name} are still only on flash",
            human(kept)
        ),
    };
    if lost > 0 {
        text.push_str(&format!("; {}", lost_text(info)));
    } else if let Some(threat) = flash_threat(flash).filter(|_| kept > 0) {
        text.push_str(&format!("; {threat}"));
    } else if let Some(trouble) = &info.cannot_write_back {
        text.push_str(&format!(
            ", nothing is lost, but the origin does not take it: {}",
            plain(&trouble.error)
        ));
    } else {
        text.push_str(", nothing is lost");
    }
    text
}

fn show_progress(line: &mut StatusLine, info: &DiskInfo) {
    let Some(progress) = info.progress.filter(|p| !p.done) else {
        return;
    };
    let eta = match progress.eta_seconds {
        Some(seconds) => format!("{} left", human_seconds(seconds)),
        None => "time left unknown".to_owned(),
    };
    line.show(|| {
        format!(
            "{}: {} blocks ({}) left, {}/s, {eta}",
            plain(&info.name),
            progress.blocks_left,
            human(progress.bytes_left),
            human(progress.bytes_per_second as u64),
        )
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_in_seconds_have_one_form() {
        for (seconds, text) in [(0.5, "0.5 s"), (30.0, "30 s"), (120.0, "2 min 0 s")] {
            assert_eq!(span(seconds), text);
        }
    }

    #[test]
    fn relative_origins_are_ours() {
        let cwd = std::env::current_dir().unwrap();
        assert_eq!(
            absolute_origin("x.raw").unwrap(),
            cwd.join("x.raw").to_string_lossy()
        );
        assert_eq!(absolute_origin("model-hdd:/a").unwrap(), "model-hdd:/a");
        assert_eq!(
            absolute_origin("qcow2:x.qcow2").unwrap(),
            format!("qcow2:{}", cwd.join("x.qcow2").display())
        );
        assert_eq!(absolute_origin("nbd://h/x").unwrap(), "nbd://h/x");
        assert!(absolute_origin("model-hdd:").is_err());
    }

    #[test]
    fn nothing_is_promised_of_flash_that_has_failed() {
        let disk = |dirty: u64| -> DiskInfo {
            serde_json::from_value(serde_json::json!({
                "id": 1, "name": "vm", "origin": "/o", "state": "attached", "mode": "write-back",
                "size": 8192, "cached": 4096, "dirty": dirty, "block_size": 4096, "min": 0, "max": 0,
                "seq_cutoff": 0, "read_only": false, "connections": 0,
            }))
            .unwrap()
        };
        let said = |dirty, flash| called_off_text(&disk(dirty), flash);
        assert!(said(4096, Some("serving")).ends_with("only on flash, nothing is lost"));
        assert!(said(0, Some("failed")).ends_with("nothing is lost"));
        for flash in [Some("failed"), Some("leaving"), None] {
            let said = said(4096, flash);
            assert!(!said.contains("nothing is lost"), "{said}");
        }
    }
}
