//! The daemon answers while the host it runs on thrashes, swapping to a part of its own pool.
//!
//! The host is a control group: the daemon and programs that want far more memory than there is for all of them.

use super::in_pool::Swept;
use super::*;
use hearth_rig::daemon::path;
use hearth_rig::process::status;
use std::time::Instant;

/// Memory of the host.
const HOST: u64 = 192 * MIB;
/// What each of so many programs wants of it, in MiB.
const WANTED: [u64; 3] = [100, 100, 100];
/// Times the daemon is asked.
const ASKED: u64 = 400;

/// Major faults of a process since it began: pages that it had to wait for.
fn major_faults(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything; what follows it is numbers from the third on.
    let rest = stat.rsplit_once(')').context("no name")?.1;
    let field = rest.split_whitespace().nth(9).context("no such field")?;
    Ok(field.parse()?)
}

/// What so many in a thousand took at most, in microseconds.
fn took(sorted: &[Duration], of_thousand: usize) -> u128 {
    let at = (sorted.len() * of_thousand / 1000).min(sorted.len() - 1);
    sorted[at].as_micros()
}

fn told(what: &str, mut all: Vec<Duration>) {
    all.sort_unstable();
    println!(
        "{what}: median {} µs, 90 % {} µs, 99 % {} µs, longest {} µs of {}",
        took(&all, 500),
        took(&all, 900),
        took(&all, 990),
        took(&all, 1000),
        all.len()
    );
}

#[test]
fn it_answers_while_the_host_thrashes_and_waits_for_no_page() -> Result<()> {
    let test = "it_answers_while_the_host_thrashes";
    if daemon(test)?.is_none() || !have(test, &["losetup", "swapoff"]) {
        return Ok(());
    }
    // What is declared first goes last: the group when nobody is in it any more.
    let Some(group) = Group::of(test, HOST)? else {
        return Ok(());
    };
    let mut hearth = Hearth::with_pool("1G")?;
    hearth.wrap = group.wrap();
    hearth.serve_args = vec!["--lock-memory".into(), "required".into()];
    hearth.start()?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let content = std::fs::read(&origin)?;
    let mut client = hearth.connect("d")?;
    let swept = Swept::of(&hearth)?;
    said(&hearth, &["on", "--size", "384M", "--in-pool"])?;
    let pid = hearth.pid().context("no daemon")?;
    let api = hearth.api();

    let mut ask = |paths: &[&str]| -> Result<[Vec<Duration>; 2]> {
        let (mut control, mut blocks) = (Vec::new(), Vec::new());
        for n in 0..ASKED {
            let begun = Instant::now();
            api.text(paths[n as usize % paths.len()])?;
            control.push(begun.elapsed());
            let at = n % 16 * MIB + n / 16 * 4096;
            let begun = Instant::now();
            let got = client.read(at, 4096)?;
            blocks.push(begun.elapsed());
            ensure!(got == content[at as usize..][..4096], "at {at}");
        }
        Ok([control, blocks])
    };
    let paths = ["/v1/pool", "/v1/disks", "/v1/stats", "/metrics", "/v1/swap"];
    let [control, blocks] = ask(&paths)?;
    told("nobody is short: the control socket answers", control);
    told("nobody is short: 4 KiB are read", blocks);

    let mut hogs = Vec::new();
    for mib in WANTED {
        hogs.push(group.hog(mib)?);
    }
    // All of what they want has been written once, and looked at: from here on they take pages from each other.
    hogs.iter_mut().try_for_each(|hog| hog.looked())?;
    let thrash = |hogs: &[hearth_rig::short::Hog]| -> Result<u64> {
        hogs.iter().map(|hog| major_faults(hog.pid())).sum()
    };
    let (theirs, its) = (thrash(&hogs)?, major_faults(pid)?);
    let begun = Instant::now();
    let [control, blocks] = ask(&paths)?;
    let elapsed = begun.elapsed();
    let (theirs, its) = (thrash(&hogs)? - theirs, major_faults(pid)? - its);
    told("the host thrashes: the control socket answers", control);
    told("the host thrashes: 4 KiB are read", blocks);
    let (out, locked) = (status(pid, "VmSwap:")?, status(pid, "VmLck:")?);
    println!(
        "in {} ms the programs waited for {theirs} pages, the daemon for {its}; {out} bytes of the daemon are swapped out, {locked} are locked",
        elapsed.as_millis()
    );
    ensure!(theirs > ASKED, "nobody thrashed: {theirs} pages came back");
    ensure!(
        its == 0,
        "the daemon waited for {its} pages, as those that thrash do"
    );
    ensure!(out == 0 && locked > 0, "{out} swapped out, {locked} locked");
    hogs.iter_mut().try_for_each(|hog| hog.looked())?;
    drop(hogs);
    drop(client);
    said(&hearth, &["off"])?;
    ensure!(swept.loops().is_empty());
    hearth.stop()?;
    Ok(())
}
