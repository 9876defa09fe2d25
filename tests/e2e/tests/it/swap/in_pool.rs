//! Swap inside the pool: set aside and given back while disks are served, on a block device and in a file.

use super::throttled::Throttled;
use super::*;
use hearth_rig::daemon::binary;
use hearth_rig::rng::Rng;
use std::io::{BufRead, BufReader};

/// A loop device, taken away at the end.
pub(super) struct Loop(pub(super) String);

impl Loop {
    pub(super) fn over(file: &Path) -> Option<Loop> {
        Loop::with(file, "off")
    }

    /// A loop device past the page cache: every read reaches the file.
    pub(super) fn past_cache(file: &Path) -> Option<Loop> {
        Loop::with(file, "on")
    }

    fn with(file: &Path, direct: &str) -> Option<Loop> {
        let mut command = Command::new("losetup");
        let direct = format!("--direct-io={direct}");
        let command = command.args(["--find", "--show", &direct]).arg(file);
        let out = command.output().ok()?;
        let name = String::from_utf8(out.stdout).ok()?.trim().to_owned();
        (out.status.success() && !name.is_empty()).then_some(Loop(name))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A loop device that nobody uses yet, with a scheduler of its own as some systems give it one; as before when dropped.
struct Meddled {
    node: String,
    before: String,
}

impl Meddled {
    /// The one that whoever asks for one gets next.
    fn with_the_next() -> Option<Meddled> {
        let out = Command::new("losetup").arg("--find").output().ok()?;
        let node = String::from_utf8(out.stdout).ok()?.trim().to_owned();
        let mut meddled = Meddled {
            node,
            before: String::new(),
        };
        let now = meddled.now().ok()?;
        meddled.before = now.split_once('[')?.1.split_once(']')?.0.to_owned();
        std::fs::write(meddled.file(), "mq-deadline").ok()?;
        Some(meddled)
    }

    fn file(&self) -> String {
        let name = self.node.trim_start_matches("/dev/");
        format!("/sys/block/{name}/queue/scheduler")
    }

    fn now(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.file())?)
    }
}

impl Drop for Meddled {
    fn drop(&mut self) {
        if !self.before.is_empty() {
            let _ = std::fs::write(self.file(), &self.before);
        }
    }
}

/// Whatever becomes of the test, nothing is swapped to what lies over its flash.
pub(super) struct Swept {
    flash: PathBuf,
    page_cluster: String,
}

impl Swept {
    pub(super) fn of(hearth: &Hearth) -> Result<Swept> {
        Ok(Swept {
            flash: hearth.flash().to_owned(),
            page_cluster: page_cluster()?,
        })
    }

    /// Loop devices over it.
    pub(super) fn loops(&self) -> Vec<String> {
        let mut command = Command::new("losetup");
        command.args(["--noheadings", "--output", "NAME", "--associated"]);
        let out = command.arg(&self.flash).output();
        let text = out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
        let text = text.unwrap_or_default();
        text.lines().map(|line| line.trim().to_owned()).collect()
    }

    /// As a boot leaves it.
    fn unused(&self) {
        for node in self.loops() {
            swapoff(Path::new(&node));
            drop(Loop(node));
        }
    }
}

impl Drop for Swept {
    fn drop(&mut self) {
        self.unused();
        let _ = std::fs::write(PAGE_CLUSTER, &self.page_cluster);
    }
}

/// A daemon whose pool has a block device, or else a file; with a disk that was written to.
fn served(test: &str, device: bool) -> Result<Option<(Hearth, Option<Loop>, Disk)>> {
    if daemon(test)?.is_none() || !have(test, &["losetup", "swapoff"]) {
        return Ok(None);
    }
    let mut hearth = Hearth::bare()?;
    let mut below = None;
    if device {
        let file = hearth.dir().join("device");
        std::fs::File::create(&file)?.set_len(320 * MIB)?;
        below = Loop::over(&file);
        let Some(Loop(node)) = &below else {
            println!("SKIPPED {test}: no loop devices here");
            return Ok(None);
        };
        hearth.set_flash(node.into());
        hearth.ok(&["pool", "create", "--flash", node])?;
    } else {
        hearth.create_pool("320M")?;
    }
    hearth.start()?;
    let origin = hearth.origin("origin", 96 * MIB)?;
    hearth.add("vm", &origin.display().to_string(), &[])?;
    let mut disk = Disk(0);
    disk.write(&hearth)?;
    Ok(Some((hearth, below, disk)))
}

/// What the disk is to hold: how often it was written.
struct Disk(u64);

impl Disk {
    fn block(&self, n: u64) -> Vec<u8> {
        let mut out = vec![0; MIB as usize];
        Rng::new(self.0 << 32 | n).fill(&mut out);
        out
    }

    /// All of it is written anew, and is dirty.
    fn write(&mut self, hearth: &Hearth) -> Result<()> {
        self.0 += 1;
        let mut client = hearth.connect("vm")?;
        for n in 0..96 {
            client.write(n * MIB, &self.block(n))?;
        }
        Ok(client.flush()?)
    }

    fn check(&self, hearth: &Hearth) -> Result<()> {
        let mut client = hearth.connect("vm")?;
        for n in 0..96 {
            let found = client.read(n * MIB, MIB as u32)?;
            ensure!(found == self.block(n), "block {n} is another");
        }
        Ok(())
    }
}

fn device_of_pool(hearth: &Hearth) -> Result<Value> {
    let shown = hearth.ok(&["pool", "show", "--json"])?;
    let shown: Value = serde_json::from_str(&shown)?;
    Ok(shown["devices"][0].clone())
}

#[test]
fn a_pool_on_a_block_device_has_swap_inside() -> Result<()> {
    let test = "a_pool_on_a_block_device_has_swap_inside";
    let Some((mut hearth, _below, mut disk)) = served(test, true)? else {
        return Ok(());
    };
    let Some(group) = Group::of(test, 64 * MIB)? else {
        return Ok(());
    };
    let swept = Swept::of(&hearth)?;
    let before = device_of_pool(&hearth)?;
    ensure!(before["swap"] == 0, "{before}");
    let too_much = refused(&hearth, &["on", "--size", "310M"])?;
    ensure!(too_much.contains("--size"), "{too_much}");
    ensure!(swept.loops().is_empty());

    // Where there is no file to make one beside it is inside.
    let meddled = Meddled::with_the_next();
    let made = said(&hearth, &["on", "--size", "128M"])?;
    let taken = swept.loops().first() == meddled.as_ref().map(|m| &m.node);
    let meddled = meddled.filter(|_| taken);
    match &meddled {
        Some(meddled) => ensure!(meddled.now()?.contains("[none]"), "{}", meddled.now()?),
        None => println!("{test}: no loop device with a scheduler of its own is to be had here"),
    }
    ensure!(made["areas"][0]["on"] == true, "{made}");
    ensure!(made["areas"][0]["in_pool"]["flash"] == hearth.flash().display().to_string());
    ensure!(page_cluster()? == "0");
    let shown = device_of_pool(&hearth)?;
    ensure!(shown["swap"].as_u64() == Some(128 * MIB), "{shown}");
    ensure!(
        shown["log_bytes"].as_u64() < before["log_bytes"].as_u64(),
        "{shown}"
    );
    disk.check(&hearth)?;
    let again = refused(&hearth, &["on", "--size", "8M", "--in-pool"])?;
    ensure!(again.contains("already"), "{again}");
    let flash = hearth.flash().display().to_string();
    let copied = hearth.refused(&["pool", "replace-flash", &flash, "/tmp/none", "--yes"])?;
    ensure!(copied.contains("swap off"), "{copied}");

    // The kernel goes on while the daemon is killed, and the daemon finds its flash in use there, and by whom.
    // Less than there is swap: what is read back may keep its place there.
    let mut hog = group.hog(112)?;
    hog.looked()?;
    ensure!(used(&hearth)? > 40 * MIB, "{}", area(&hearth)?);
    hearth.kill9()?;
    hog.looked()?;
    hearth.start()?;
    disk.check(&hearth)?;
    disk.write(&hearth)?;
    hog.looked()?;
    drop(hog);
    hearth.stop()?;
    hearth.start()?;
    disk.check(&hearth)?;

    let gone = said(&hearth, &["off"])?;
    ensure!(gone["areas"] == Value::Array(Vec::new()), "{gone}");
    ensure!(gone["idle"] == Value::Array(Vec::new()), "{gone}");
    ensure!(swept.loops().is_empty() && page_cluster()? == swept.page_cluster);
    if let Some(meddled) = meddled {
        ensure!(
            meddled.now()?.contains("[mq-deadline]"),
            "{}",
            meddled.now()?
        );
    }
    let after = device_of_pool(&hearth)?;
    ensure!(
        after["swap"] == 0 && after["log_bytes"] == before["log_bytes"],
        "{after}"
    );
    // What was swap is cache again, also after a crash.
    disk.write(&hearth)?;
    hearth.kill9()?;
    hearth.start()?;
    disk.check(&hearth)
}

#[test]
fn a_boot_finds_what_is_set_aside_in_a_pool() -> Result<()> {
    let test = "a_boot_finds_what_is_set_aside_in_a_pool";
    let Some((mut hearth, _, disk)) = served(test, false)? else {
        return Ok(());
    };
    let swept = Swept::of(&hearth)?;
    let holes = refused(
        &hearth,
        &["on", "--size", "32M", "--in-pool", "--discard", "once"],
    )?;
    ensure!(holes.contains("holes"), "{holes}");
    ensure!(device_of_pool(&hearth)?["swap"] == 0);
    said(
        &hearth,
        &["on", "--size", "32M", "--in-pool", "--priority", "9"],
    )?;
    let noted = std::fs::read_to_string(hearth.dir().join("state/swap.json"))?;
    ensure!(noted.contains("\"version\": 2"), "{noted}");

    // Only a daemon can take it back: without one it stays in use.
    hearth.stop()?;
    let told = refused(&hearth, &["off"])?;
    ensure!(told.contains("nothing was changed"), "{told}");
    let still = area(&hearth)?;
    ensure!(still["on"] == true && still["stage"] == "used", "{still}");

    // A boot: the kernel has forgotten all, and the daemon does not run yet.
    swept.unused();
    ensure!(area(&hearth)?["on"] == false);
    said(&hearth, &["resume"])?;
    let now = area(&hearth)?;
    ensure!(now["on"] == true && now["priority"] == 9, "{now}");
    hearth.start()?;
    disk.check(&hearth)?;
    // Whoever does not know of it is told, and takes nothing away that is in use.
    let elsewhere = hearth.dir().join("other").display().to_string();
    let told = hearth.refused(&["swap", "off", "--state-dir", &elsewhere])?;
    ensure!(told.contains("swaps to"), "{told}");

    // What is not swap any more is not swapped to.
    swept.unused();
    said(&hearth, &["resume"])?;
    let node = swept.loops().pop().context("no loop device")?;
    swapoff(Path::new(&node));
    ensure!(Command::new("mkswap").arg(&node).output()?.status.success());
    let told = refused(&hearth, &["resume"])?;
    ensure!(told.contains("other swap"), "{told}");
    ensure!(swept.loops().is_empty());

    // Another host, or lost notes: it swaps nowhere, and `off` gives back what is set aside.
    std::fs::remove_file(hearth.dir().join("state/swap.json"))?;
    said(&hearth, &["resume"])?;
    let shown = said(&hearth, &["show"])?;
    ensure!(shown["areas"] == Value::Array(Vec::new()), "{shown}");
    ensure!(
        shown["idle"][0]["bytes"].as_u64() == Some(32 * MIB),
        "{shown}"
    );
    let there = refused(&hearth, &["on", "--size", "32M", "--in-pool"])?;
    ensure!(there.contains("swap off"), "{there}");
    said(&hearth, &["off"])?;
    ensure!(device_of_pool(&hearth)?["swap"] == 0);
    disk.check(&hearth)
}

/// Killed while something is set aside or given back, it is one or the other, and no write is lost.
#[test]
fn killed_on_the_way_it_is_set_aside_or_not() -> Result<()> {
    let test = "killed_on_the_way_it_is_set_aside_or_not";
    let Some((mut hearth, _, mut disk)) = served(test, false)? else {
        return Ok(());
    };
    let swept = Swept::of(&hearth)?;
    let cycles: usize = std::env::var("CYCLES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(3);
    let mut rng = Rng::new(5);
    for cycle in 0..cycles * 2 {
        disk.write(&hearth)?;
        let on: &[&str] = match cycle % 2 {
            0 => &["on", "--size", "64M", "--in-pool"],
            _ => &["off"],
        };
        let mut command = Command::new(binary()?)
            .args([
                "--run-dir".to_owned(),
                hearth.run_dir().display().to_string(),
            ])
            .args(words(&hearth, on))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // At any moment of it, also before and after: what is looked at below holds at all of them.
        let upto = Duration::from_millis(rng.next_u64() % 300);
        let begun = std::time::Instant::now();
        let _ = wait::until("a moment", LIMIT, || (begun.elapsed() > upto).then_some(()));
        hearth.kill9()?;
        command.wait()?;
        hearth.start()?;
        disk.check(&hearth)?;
        let shown = said(&hearth, &["show"])?;
        let set = device_of_pool(&hearth)?["swap"]
            .as_u64()
            .context("not said")?;
        let listed = |of: &str| shown[of].as_array().map_or(0, Vec::len);
        // What is set aside is told; what is noted as going may be gone.
        let known = listed("areas") + listed("idle");
        ensure!(set == 0 || set == 64 * MIB && known == 1, "{set}: {shown}");
        if cycle % 2 == 1 {
            said(&hearth, &["off"])?;
            ensure!(device_of_pool(&hearth)?["swap"] == 0 && swept.loops().is_empty());
        } else if shown["areas"] == Value::Array(Vec::new()) && set == 0 {
            said(&hearth, &["on", "--size", "64M", "--in-pool"])?;
        }
        disk.check(&hearth)?;
    }
    Ok(())
}

/// Where much is dirty, swap takes the room that can be made, with progress, and can be called off
/// meanwhile. Where what is dirty would not have room in the rest, so that writers would stand
/// still, it says no, with the figures. Nothing is lost, and nothing is left half done.
#[test]
fn dirty_pool_makes_room_or_refuses() -> Result<()> {
    let test = "dirty_pool_makes_room_or_refuses";
    let Some((mut hearth, below, mut disk)) = served(test, true)? else {
        return Ok(());
    };
    let swept = Swept::of(&hearth)?;
    hearth.ok(&["disk", "flush", "vm"])?;
    // Twice, so that what comes next lies in the part that is to be set aside.
    disk.write(&hearth)?;
    hearth.ok(&["disk", "flush", "vm"])?;
    // Of what may be dirty a tenth is kept for the others in write-back: there is none.
    hearth.ok(&["disk", "set", "vm", "--mode", "write-through"])?;
    let capacity = device_of_pool(&hearth)?["log_bytes"].as_u64();
    let capacity = capacity.context("not said")?;
    // Sixty in a hundred may be dirty, and from fifty-five on writers are slowed down for the origin, which takes nothing.
    let blocks = capacity / 100 * 33 / MIB;
    let file = hearth.dir().join("slow");
    std::fs::File::create(&file)?.set_len(blocks * MIB)?;
    let slow = format!("fault=eio-write:{}", file.display());
    hearth.add("slow", &slow, &[])?;
    let block = |n: u64| -> Vec<u8> {
        let mut out = vec![0; MIB as usize];
        Rng::new(77 << 32 | n).fill(&mut out);
        out
    };
    let mut client = hearth.connect("slow")?;
    for n in 0..blocks {
        client.write(n * MIB, &block(n))?;
    }
    client.flush()?;
    let shown: Value = serde_json::from_str(&hearth.ok(&["disk", "show", "slow", "--json"])?)?;
    let dirty = shown["dirty"].as_u64().context("not said")?;
    ensure!(dirty == blocks * MIB, "{dirty} of {capacity} are dirty");

    // What there is room for takes as long as it takes to move what is dirty, and is called off meanwhile. First, for an attempt that is
    // refused may have moved nearly all of it.
    let on = ["on", "--size", "96M", "--in-pool"];
    if let Some(Loop(node)) = &below
        && let Some(_throttled) = Throttled::writes(test, node, 2 * MIB)?
    {
        let mut command = Command::new(binary()?);
        command.arg("--run-dir").arg(hearth.run_dir());
        command.args(words(&hearth, &on)).stdout(Stdio::null());
        let mut command = command.stderr(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(command.stderr.take().context("no pipe")?).lines();
        let line = lines.next().context("it said nothing")??;
        ensure!(
            line.contains("making room: ") && line.contains(" of 96 MiB"),
            "{line}"
        );
        // SAFETY: a signal to a child that was not waited for.
        unsafe { libc::kill(command.id() as libc::pid_t, libc::SIGINT) };
        let status = command.wait()?;
        let rest = lines.collect::<std::io::Result<Vec<_>>>()?.join("\n");
        ensure!(
            status.code() == Some(130) && rest.contains("called off"),
            "{status}: {rest}"
        );
        ensure!(device_of_pool(&hearth)?["swap"] == 0 && swept.loops().is_empty());
    }

    // In the other half more than sixty in a hundred would be dirty.
    let half = format!("{}M", capacity / 2 / MIB - 8);
    let told = refused(&hearth, &["on", "--size", &half, "--in-pool"])?;
    println!("{dirty} of {capacity} bytes are dirty: {told}");
    ensure!(
        told.contains("MiB wait for the origins")
            && told.contains("clients would have to wait for room")
            && told.contains("give a smaller --size"),
        "{told}"
    );
    // Nobody who writes has to wait.
    client.write(0, &block(0))?;
    client.flush()?;
    ensure!(device_of_pool(&hearth)?["swap"] == 0 && swept.loops().is_empty());

    said(&hearth, &on)?;
    ensure!(device_of_pool(&hearth)?["swap"] == 96 * MIB && area(&hearth)?["on"] == true);
    let check = |hearth: &Hearth| -> Result<()> {
        let mut client = hearth.connect("slow")?;
        for n in 0..blocks {
            ensure!(client.read(n * MIB, MIB as u32)? == block(n), "block {n}");
        }
        disk.check(hearth)
    };
    check(&hearth)?;
    drop(client);
    hearth.kill9()?;
    hearth.start()?;
    check(&hearth)?;
    said(&hearth, &["off"])?;

    // What lives on flash goes nowhere.
    hearth.ok(&["disk", "add", "f", "--flash-only", &half])?;
    let told = refused(&hearth, &["on", "--size", "32M", "--in-pool"])?;
    ensure!(
        told.contains("32 MiB cannot be set aside")
            && told.contains("are promised to such disks")
            && told.contains("smaller --size"),
        "{told}"
    );
    ensure!(device_of_pool(&hearth)?["swap"] == 0);
    Ok(())
}

/// What swap inside a pool cannot be, it says, with what to do instead.
#[test]
fn where_swap_cannot_be_inside_it_says_what_to_do() -> Result<()> {
    let test = "where_swap_cannot_be_inside_it_says_what_to_do";
    if daemon(test)?.is_none() || !have(test, &["losetup", "swapoff"]) {
        return Ok(());
    }
    for copies in ["2", "1"] {
        let mut hearth = Hearth::bare()?;
        let swept = Swept::of(&hearth)?;
        let first = hearth.flash().display().to_string();
        let second = hearth.dir().join("second").display().to_string();
        let swept_too = Swept {
            flash: second.clone().into(),
            page_cluster: page_cluster()?,
        };
        let create = ["pool", "create", "--dirty-copies", copies];
        let devices = [
            "--flash", &first, "--flash", &second, "--size", "160M", "--size", "160M",
        ];
        hearth.ok(&[&create[..], &devices[..]].concat())?;
        hearth.serve_args = vec!["--flash".into(), second.clone()];
        hearth.start()?;
        let on = ["on", "--size", "32M", "--in-pool", "--device", &second];
        if copies == "2" {
            let told = refused(&hearth, &on)?;
            ensure!(told.contains("each lie on two devices"), "{told}");
            ensure!(told.contains("--flash FILE"), "{told}");
            continue;
        }
        said(&hearth, &on)?;
        // Another size, and another place.
        let told = refused(&hearth, &["on", "--size", "64M", "--in-pool"])?;
        ensure!(told.contains("hearth swap off"), "{told}");
        let told = hearth.refused(&["pool", "remove-flash", &second])?;
        ensure!(told.contains("set aside for swap"), "{told}");
        ensure!(told.contains("`hearth swap off` gives it back"), "{told}");
        ensure!(area(&hearth)?["on"] == true);
        said(&hearth, &["off"])?;
        let again = ["on", "--size", "64M", "--in-pool", "--device", &first];
        let made = said(&hearth, &again)?;
        ensure!(made["areas"][0]["in_pool"]["flash"] == first, "{made}");
        hearth.ok(&["pool", "remove-flash", &second])?;
        ensure!(area(&hearth)?["on"] == true);
        said(&hearth, &["off"])?;
        ensure!(swept.loops().is_empty() && swept_too.loops().is_empty());
    }
    Ok(())
}

/// What is swapped out is told, and counts against the budget that the cache has.
#[test]
fn what_is_swapped_out_is_counted_with_what_the_cache_writes() -> Result<()> {
    let test = "what_is_swapped_out_is_counted_with_what_the_cache_writes";
    let Some((mut hearth, _, disk)) = served(test, false)? else {
        return Ok(());
    };
    let Some(group) = Group::of(test, 64 * MIB)? else {
        return Ok(());
    };
    let _swept = Swept::of(&hearth)?;
    hearth.stop()?;
    hearth.serve_args = vec!["--endurance".into(), "16K/s".into()];
    hearth.start()?;
    for inside in [true, false] {
        let mut on = vec!["on", "--size", "128M"];
        let flash = hearth.flash().display().to_string();
        match inside {
            true => on.push("--in-pool"),
            false => on.extend(["--flash", &flash]),
        }
        let _file = After::of(&hearth)?;
        said(&hearth, &on)?;
        let now = || said(&hearth, &["show"]);
        let counted = |shown: &Value| shown["endurance"]["swap_write_bytes"].as_u64();
        let before = wait::until("the budget is told", LIMIT, || counted(&now().ok()?))?;
        // It has been seen with the area in use.
        if inside {
            wait::until("both are told", LIMIT, || {
                now().ok()?["traffic"]["swap_read_bytes_per_s"].as_u64()
            })?;
        }
        // Less than there is swap: what is read back may keep its place there.
        let mut hog = group.hog(112)?;
        hog.looked()?;
        let after = wait::until("it is counted", LIMIT, || {
            hog.looked().ok()?;
            let more = counted(&now().ok()?)?.saturating_sub(before);
            (more > 32 * MIB).then_some(more)
        })?;
        println!("inside: {inside}, counted: {after}");
        let stats = hearth.ok(&["stats", "--json"])?;
        let stats: Value = serde_json::from_str(&stats)?;
        let used = stats["pool"]["endurance_used"].as_f64();
        // 16 KiB a second are 56 MiB an hour.
        ensure!(used > Some(0.0), "{used:?}");
        let metrics = hearth.ok(&["metrics"]).unwrap_or_default();
        println!(
            "{}",
            metrics
                .lines()
                .filter(|l| l.contains("hearth_swap"))
                .count()
        );
        drop(hog);
        said(&hearth, &["off"])?;
    }
    disk.check(&hearth)
}
