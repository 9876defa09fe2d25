//! Attacks on the comparison of cached blocks with their origin: the origin stops answering or returns errors, clients
//! write, the daemon is killed, the state directory is full.

use super::*;
use hearth_rig::namespace::is_in_own_mounts;

/// A disk whose server can be made slow, silent, or to fail reads; half of it is cached, and something is dirty.
struct Slow {
    hearth: Hearth,
    server: Server,
    file: PathBuf,
    /// While it is there, reads fail.
    fail: PathBuf,
    /// Bits a second that the server moves, in text; no limit while it is not there.
    rate: PathBuf,
}

const DIRTY: u64 = 20 * MIB;
const DIRTY_LEN: usize = 65536;
/// Blocks that are compared before something happens: more than those that are compared whatever the time.
const COMPARED: u64 = 300;

impl Slow {
    fn new(mode: &str) -> Result<Slow> {
        let hearth = Hearth::serving("256M")?;
        let file = hearth.dir().join("o.raw");
        write_random(&file, SIZE, 1)?;
        let (fail, rate) = (hearth.dir().join("fail"), hearth.dir().join("rate"));
        let args = ["-f", "-U", "{socket}", "--filter=error", "--filter=rate"];
        let file_of = |key: &str, file: &Path| format!("{key}-file={}", path(file));
        let more = [
            "file",
            path(&file),
            "error-pread=EIO",
            "error-pread-rate=100%",
            &file_of("error-pread", &fail),
            &file_of("rate", &rate),
        ];
        let socket = hearth.dir().join("nbd.sock");
        let server = Server::start("nbdkit", &[&args[..], &more].concat(), socket)?;
        let origin = format!(
            "nbd+unix:///?socket={}",
            path(&hearth.dir().join("nbd.sock"))
        );
        let how = ["--sole-user", "--seq-cutoff", "0", "--origin-timeout", "5"];
        hearth.add("d", &origin, &[&how[..], &["--mode", mode]].concat())?;
        warm_up(&hearth)?;
        let mut client = hearth.connect("d")?;
        client.write(DIRTY, &[0xEE; DIRTY_LEN])?;
        client.flush()?;
        drop(client);
        Ok(Slow {
            hearth,
            server,
            file,
            fail,
            rate,
        })
    }

    /// Starts the daemon with a slow origin, and waits until some blocks were compared.
    fn start_slowly(&mut self) -> Result<()> {
        std::fs::write(&self.rate, "8M")?;
        self.hearth.start()?;
        wait::until("some blocks were compared", LIMIT, || {
            let info = show(&self.hearth, "d").ok()?;
            (info["check"]["compared"].as_u64()? > COMPARED).then_some(())
        })
        .with_context(|| self.hearth.log())
    }

    fn speed_up(&self) -> Result<()> {
        Ok(std::fs::remove_file(&self.rate)?)
    }

    fn is_written_back(&self) -> Result<bool> {
        let mut held = vec![0; DIRTY_LEN];
        let file = OpenOptions::new().read(true).open(&self.file)?;
        file.read_exact_at(&mut held, DIRTY)?;
        Ok(held == [0xEE; DIRTY_LEN])
    }

    /// Blocks that the last comparison found equal.
    fn compared(&self) -> Result<u64> {
        let log = self.hearth.log();
        let mut lines = log.lines().rev();
        let last = lines.find(|line| line.contains("were compared with the origin"));
        let number = last.and_then(|line| line.split("blocks=").nth(1));
        let number = number.context("no comparison")?;
        Ok(number
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .parse()?)
    }
}

/// A server that stops answering ends no comparison: nothing is written back before enough was compared.
#[test]
fn silent_origin_does_not_pass_comparison() -> Result<()> {
    let mut s = Slow::new("write-back")?;
    s.hearth.kill9()?;
    s.start_slowly()?;
    s.server.signal(libc::SIGSTOP)?;
    wait::until("the comparison is given up for now", LIMIT, || {
        let is_repeated = s
            .hearth
            .log()
            .contains("the comparison with the origin is repeated");
        let has_ended = show(&s.hearth, "d").ok()?["check"].is_null();
        (is_repeated || has_ended).then_some(())
    })?;
    let info = show(&s.hearth, "d")?;
    ensure!(!info["check"].is_null(), "it passed: {info}");
    s.speed_up()?;
    s.server.signal(libc::SIGCONT)?;
    let info = until_checked(&s.hearth)?;
    ensure!(info["notices"].is_null(), "{info}");
    let hot = (HOT.end - HOT.start) / 4096;
    ensure!(s.compared()? * 100 >= hot * 61, "{}", s.hearth.log());
    s.hearth.ok(&["disk", "flush", "d"])?;
    ensure!(s.is_written_back()?);
    Ok(())
}

/// Errors at a start are no sign of another disk: it waits, and attaches when the origin can be read.
#[test]
fn unreadable_origin_is_waited_for() -> Result<()> {
    let mut s = Slow::new("write-back")?;
    s.hearth.kill9()?;
    std::fs::write(&s.fail, "")?;
    s.hearth.start()?;
    let info = wait::until("the origin was looked at", LIMIT, || {
        let info = show(&s.hearth, "d").ok()?;
        let reason = info["reason"].to_string();
        let is_judged = info["state"] == "refused" || reason.contains("cannot be read");
        is_judged.then_some(info)
    })
    .with_context(|| s.hearth.log())?;
    ensure!(info["state"] == "waiting", "{info}");
    ensure!(info["dirty"] == DIRTY_LEN, "{info}");
    std::fs::remove_file(&s.fail)?;
    let info = until_checked(&s.hearth)?;
    ensure!(info["notices"].is_null(), "{info}");
    s.hearth.ok(&["disk", "flush", "d"])?;
    ensure!(s.is_written_back()?);
    Ok(())
}

/// Killed in the middle, the daemon compares anew; stopped in the middle as well. Nothing is lost and nothing written
/// back before.
#[test]
fn comparison_cut_off_begins_anew() -> Result<()> {
    let mut s = Slow::new("write-back")?;
    s.hearth.kill9()?;
    for in_order in [false, true, false] {
        s.start_slowly()?;
        // Written meanwhile: of the disk as it is.
        let mut client = s.hearth.connect("d")?;
        client.write(DIRTY + MIB, &[0xDD; 4096])?;
        client.flush()?;
        drop(client);
        match in_order {
            true => drop(s.hearth.stop()?),
            false => s.hearth.kill9()?,
        }
        ensure!(!s.is_written_back()?, "written before it was compared");
    }
    s.start_slowly()?;
    s.speed_up()?;
    let info = until_checked(&s.hearth)?;
    ensure!(info["notices"].is_null(), "{info}");
    is_still_cached(&s.hearth)?;
    let mut client = s.hearth.connect("d")?;
    ensure!(client.read(DIRTY, DIRTY_LEN as u32)? == [0xEE; DIRTY_LEN]);
    ensure!(client.read(DIRTY + MIB, 4096)? == [0xDD; 4096]);
    s.hearth.ok(&["disk", "flush", "d"])?;
    ensure!(s.is_written_back()?);
    Ok(())
}

/// Two clients write over blocks that are being compared, in write-through and write-back. That is no change of the origin,
/// and each client reads the new content.
#[test]
fn writes_during_comparison_are_kept() -> Result<()> {
    for mode in ["write-back", "write-through"] {
        let mut s = Slow::new(mode)?;
        s.hearth.kill9()?;
        s.start_slowly()?;
        let clients = [s.hearth.connect("d")?, s.hearth.connect("d")?];
        let written = std::thread::scope(|scope| {
            let write = |n: u64, mut client: hearth_rig::nbd::Client| -> Result<()> {
                for round in 0..40 {
                    let at = HOT.start + (round * 89 + n) * 4096;
                    client.write(at, &[n as u8 + 1; 4096])?;
                    ensure!(client.read(at, 4096)? == [n as u8 + 1; 4096]);
                }
                Ok(client.flush()?)
            };
            let threads = (0..).zip(clients);
            let threads = threads.map(|(n, client)| scope.spawn(move || write(n, client)));
            let threads: Vec<_> = threads.collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                thread
                    .join()
                    .map_err(|_| anyhow::anyhow!("a client panicked"))?
            };
            threads.into_iter().try_for_each(join)
        });
        written.with_context(|| s.hearth.log())?;
        s.speed_up()?;
        let info = until_checked(&s.hearth)?;
        ensure!(info["notices"].is_null(), "{mode}: {info}");
        let hot = read_hot(&s.hearth)?;
        for n in 0..2 {
            for round in 0..40u64 {
                let at = ((round * 89 + n) * 4096) as usize;
                ensure!(
                    hot[at..at + 4096] == [n as u8 + 1; 4096],
                    "{mode}: round {round}"
                );
            }
        }
        s.hearth.ok(&["disk", "flush", "d"])?;
        ensure!(hot_of(&s.file)? == hot, "{mode}");
    }
    Ok(())
}

/// A full state directory does not change the result of a comparison.
#[test]
fn full_state_directory_drops_stale_blocks() -> Result<()> {
    const TEST: &str = "rolled_back::attacked::full_state_directory_drops_stale_blocks";
    if !is_in_own_mounts(TEST, "true")? {
        return Ok(());
    }
    let mut hearth = Hearth::with_pool("256M")?;
    let state = hearth.dir().join("state");
    std::fs::create_dir(&state)?;
    let how = ["-t", "tmpfs", "-o", "size=16M", "tmpfs", path(&state)];
    hearth_rig::clients::run_ok("mount", &how, hearth.dir())?;
    hearth.start()?;
    let file = hearth.dir().join("o.raw");
    write_random(&file, SIZE, 1)?;
    let mut server = Server::qemu_nbd(&file, "x", hearth.dir().join("nbd.sock"))?;
    add(&hearth, "d", "nbd.sock", &[])?;
    warm_up(&hearth)?;
    hearth.kill9()?;
    server.kill9()?;
    for n in [2, 5, 8, 11, 14] {
        write(&file, n * MIB + 64 * 4096, &[0xEE; 4096])?;
    }
    server.up()?;
    let mut filler = std::fs::File::create(state.join("filler"))?;
    let full = std::io::copy(&mut std::io::repeat(1), &mut filler);
    ensure!(full.is_err_and(|e| e.kind() == std::io::ErrorKind::StorageFull));
    hearth.start()?;
    nothing_stale_is_served(&hearth, &file)?;
    let mut client = hearth.connect("d")?;
    client.write(20 * MIB, &[0xEE; 65536])?;
    client.flush()?;
    drop(client);
    hearth.kill9()?;
    hearth.start()?;
    until_checked(&hearth)?;
    ensure!(
        read_hot(&hearth)? == hot_of(&file)?,
        "a stale block came back"
    );
    ensure!(hearth.connect("d")?.read(20 * MIB, 65536)? == [0xEE; 65536]);
    hearth.ok(&["disk", "flush", "d"])?;
    Ok(())
}
