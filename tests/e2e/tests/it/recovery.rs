//! The procedures of docs/recovery.md, and what `hearth rescue` does with pools that are damaged.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::load::{BLOCKS, Writer};
use hearth_rig::pattern::BLOCK;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a load goes on before something happens.
const LOAD: Duration = Duration::from_millis(300);
/// Bytes of a disk.
const SIZE: u64 = 8 << 20;

fn wait_state(hearth: &Hearth, disk: &str, want: &str) -> Result<()> {
    wait::until(&format!("{disk} is {want}"), LIMIT, || {
        let info = hearth.ok(&["disk", "show", disk, "--json"]).ok()?;
        let info: Value = serde_json::from_str(&info).ok()?;
        (info["state"] == want).then_some(())
    })
    .with_context(|| hearth.log())
}

/// Datastores are opened after disks can be used.
fn wait_store(hearth: &Hearth, what: &str, is: impl Fn(&Value) -> bool) -> Result<()> {
    wait::until(&format!("the datastore is {what}"), LIMIT, || {
        let info = hearth.ok(&["datastore", "show", "vms", "--json"]).ok()?;
        is(&serde_json::from_str(&info).ok()?).then_some(())
    })
    .with_context(|| hearth.log())
}

fn blank(hearth: &Hearth, name: &str, size: u64) -> Result<PathBuf> {
    let file = hearth.dir().join(name);
    std::fs::File::create(&file)?.set_len(size)?;
    Ok(file)
}

/// What `hearth rescue` says of a pool, and whether it vouches for it.
fn rescue(hearth: &Hearth, state: &Path, more: &[&str]) -> Result<(Value, bool)> {
    let args = [
        "rescue",
        path(hearth.flash()),
        "--state-dir",
        path(state),
        "--json",
    ];
    let out = hearth.hearth(&[&args[..], more].concat())?;
    let text = String::from_utf8_lossy(&out.stdout);
    let json = serde_json::from_str(&text)
        .with_context(|| format!("{text}{}", String::from_utf8_lossy(&out.stderr)))?;
    Ok((json, out.status.success()))
}

/// A killed daemon with a dirty disk `d` on `d.raw`, of which block `n` holds bytes `n + 1`, for each of `blocks`.
fn dirty(blocks: &[u64]) -> Result<(Hearth, PathBuf)> {
    let mut hearth = Hearth::with_pool("160M")?;
    // Slow enough that hardly anything is written back meanwhile.
    hearth.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
    hearth.start()?;
    let origin = blank(&hearth, "d.raw", SIZE)?;
    hearth.add("d", path(&origin), &[])?;
    let mut client = hearth.connect("d")?;
    for block in blocks {
        client.write(block * 4096, &[*block as u8 + 1; 4096])?;
        // Each is known to be durable by the next one.
        client.flush()?;
    }
    hearth.kill9()?;
    Ok((hearth, origin))
}

/// Where on the flash a block of bytes `byte` lies.
fn places(flash: &Path, byte: u8) -> Result<Vec<u64>> {
    let all = std::fs::read(flash)?;
    let blocks = all.chunks(4096).enumerate();
    let found = blocks.filter(|(_, block)| block.len() == 4096 && block.iter().all(|b| *b == byte));
    Ok(found.map(|(at, _)| at as u64 * 4096).collect())
}

fn overwrite(flash: &Path, at: u64, data: &[u8]) -> Result<()> {
    let file = std::fs::OpenOptions::new().write(true).open(flash)?;
    Ok(file.write_all_at(data, at)?)
}

/// Hearth is gone: no daemon, no state directory, only the flash and the origin.
#[test]
fn what_is_dirty_is_written_over_the_origin_without_a_daemon() -> Result<()> {
    let mut hearth = Hearth::serving("160M")?;
    let origin = blank(&hearth, "d.raw", BLOCKS * BLOCK as u64)?;
    hearth.add("d", path(&origin), &[])?;
    let mut writer = Writer::new(1);
    let mut client = hearth.connect("d")?;
    writer.load(&mut client, LOAD, || Ok(()))?;
    writer.flush(&mut client)?;
    hearth.kill9()?;
    let nothing = hearth.dir().join("nothing");
    let before = std::fs::read(hearth.flash())?;
    let (listed, sure) = rescue(&hearth, &nothing, &[])?;
    ensure!(sure && listed["disks"][0]["disk"] == "d", "{listed}");
    let owed = listed["disks"][0]["dirty"].as_u64().context("no dirty")?;
    let (report, sure) = rescue(&hearth, &nothing, &["--disk", "d", "--onto", path(&origin)])?;
    ensure!(sure, "{report}");
    ensure!(report["written"].as_u64() == Some(owed), "{report}");
    writer.check_file(&origin)?;
    // It was only read.
    ensure!(std::fs::read(hearth.flash())? == before);
    // And so it may be done while nobody may write the device.
    let there = hearth.refused(&[
        "rescue",
        path(hearth.flash()),
        "--disk",
        "d",
        "--to",
        path(&origin),
    ])?;
    ensure!(there.contains("cannot make"), "{there}");
    Ok(())
}

#[test]
fn a_block_that_cannot_be_trusted_is_named_and_not_written() -> Result<()> {
    let (hearth, _) = dirty(&[1, 2, 7, 9, 10])?;
    let nothing = hearth.dir().join("nothing");
    let rotten = places(hearth.flash(), 3)?;
    ensure!(!rotten.is_empty(), "block 2 is not on the flash");
    for at in rotten {
        overwrite(hearth.flash(), at + 100, &[0xff])?;
    }
    let saved = hearth.dir().join("saved");
    let (report, sure) = rescue(&hearth, &nothing, &["--disk", "d", "--to", path(&saved)])?;
    ensure!(!sure, "it vouches for it: {report}");
    let lost = &report["untrusted"];
    ensure!(
        lost.as_array().map(Vec::len) == Some(1)
            && lost[0]["offset"] == 2 * 4096
            && lost[0]["len"] == 4096,
        "{report}"
    );
    let bytes = std::fs::read(&saved)?;
    ensure!(bytes.len() as u64 == SIZE);
    for block in 0..16usize {
        let want = if [1, 7, 9, 10].contains(&block) {
            block as u8 + 1
        } else {
            0
        };
        ensure!(
            bytes[block * 4096..][..4096] == [want; 4096],
            "block {block}"
        );
    }
    Ok(())
}

/// Both superblocks and both copies of the registry are overwritten: what was kept beside the flash stands in.
#[test]
fn a_pool_without_superblocks_is_read_by_what_was_kept_beside_it() -> Result<()> {
    let (mut hearth, origin) = dirty(&[3, 4])?;
    for at in [0, 1 << 20] {
        overwrite(hearth.flash(), at, &[0; 4096])?;
    }
    for at in [2 << 20, 3 << 20] {
        overwrite(hearth.flash(), at, &vec![0; 64 << 10])?;
    }
    let nothing = hearth.dir().join("nothing");
    let flash = path(hearth.flash()).to_owned();
    let refused = hearth.refused(&["rescue", &flash, "--state-dir", path(&nothing)])?;
    ensure!(refused.contains("no Hearth pool"), "{refused}");
    let state = hearth.dir().join("state");
    // A daemon refuses the disk, and changes nothing about that.
    hearth.start()?;
    wait_state(&hearth, "d", "refused")?;
    let (report, sure) = rescue(&hearth, &state, &["--disk", "d", "--onto", path(&origin)])?;
    ensure!(!sure, "it vouches for it: {report}");
    ensure!(report["written"] == 2 * 4096, "{report}");
    ensure!(
        report["doubts"].to_string().contains("superblock"),
        "{report}"
    );
    hearth.ok(&["disk", "set", "d", "--trust", "origin"])?;
    wait_state(&hearth, "d", "attached")?;
    ensure!(hearth.connect("d")?.read(3 * 4096, 4096)? == [4; 4096]);
    Ok(())
}

/// The host is dead: its flash and origin go to another one, which knows nothing of them.
#[test]
fn a_pool_is_moved_to_another_host() -> Result<()> {
    let (old, origin) = dirty(&[0, 5])?;
    let mut new = Hearth::bare()?;
    std::fs::rename(old.flash(), new.flash())?;
    let flash = path(new.flash()).to_owned();
    let state = new.dir().join("state");
    let import = ["pool", "import", "--flash", &flash, "--state-dir"];
    let said = new.ok(&[&import[..], &[path(&state)]].concat())?;
    ensure!(
        said.contains("ready") && said.contains(path(&origin)),
        "{said}"
    );
    ensure!(said.contains("hearth pool import --accept"), "{said}");
    // What the pool names here is not used until the administrator of this host confirms it.
    let before = std::fs::read(&origin)?;
    new.start()?;
    wait_state(&new, "d", "refused")?;
    new.logged("hearth pool import --accept")?;
    new.refused(&["disk", "set", "d", "--trust", "flash"])?;
    new.stop()?;
    ensure!(std::fs::read(&origin)? == before);
    new.start()?;
    wait_state(&new, "d", "refused")?;
    new.ok(&["pool", "import", "--accept"])?;
    wait_state(&new, "d", "attached")?;
    let mut client = new.connect("d")?;
    ensure!(client.read(5 * 4096, 4096)? == [6; 4096]);
    drop(client);
    new.ok(&["disk", "flush", "d"])?;
    new.stop()?;
    let bytes = std::fs::read(&origin)?;
    ensure!(bytes[..4096] == [1; 4096] && bytes[5 * 4096..][..4096] == [6; 4096]);
    Ok(())
}

/// The state directory is lost: one command confirms what the pool names, and nothing dirty is lost.
#[test]
fn lost_state_directory_is_replaced_by_one_command() -> Result<()> {
    let (mut hearth, origin) = dirty(&[0, 5])?;
    hearth.start()?;
    let vms = hearth.dir().join("vms");
    std::fs::create_dir(&vms)?;
    let listen = ["--nfs", "--listen", "127.0.0.1:0"];
    hearth.ok(&[&["datastore", "add", path(&vms)], &listen[..]].concat())?;
    let known = hearth.ok(&["pool", "show"])?;
    ensure!(
        known.contains("datastore vms") && !known.contains("NO"),
        "{known}"
    );
    let state = hearth.dir().join("state");
    let flash = path(hearth.flash()).to_owned();
    for with_daemon in [true, false] {
        hearth.kill9()?;
        std::fs::remove_dir_all(&state)?;
        hearth.start()?;
        wait_state(&hearth, "d", "refused")?;
        wait_store(&hearth, "not confirmed", |store| {
            store["served"] == false && store["remedy"].to_string().contains("pool import --accept")
        })?;
        let shown = hearth.ok(&["pool", "show"])?;
        ensure!(shown.matches("NO ").count() == 2, "{shown}");
        if with_daemon {
            hearth.ok(&["pool", "import", "--accept"])?;
        } else {
            hearth.stop()?;
            let at = ["--flash", &flash, "--state-dir", path(&state)];
            hearth.ok(&[&["pool", "import", "--accept"], &at[..]].concat())?;
            let shown = hearth.ok(&[&["pool", "show"], &at[..]].concat())?;
            ensure!(shown.contains("yes") && !shown.contains("NO "), "{shown}");
            hearth.start()?;
        }
        wait_state(&hearth, "d", "attached")?;
        wait_store(&hearth, "served", |store| store["served"] == true)?;
        ensure!(hearth.connect("d")?.read(5 * 4096, 4096)? == [6; 4096]);
    }
    hearth.ok(&["disk", "flush", "d"])?;
    let bytes = std::fs::read(&origin)?;
    ensure!(bytes[..4096] == [1; 4096] && bytes[5 * 4096..][..4096] == [6; 4096]);
    hearth.stop()?;
    Ok(())
}

/// A disk is dead that was no mirror: a backup takes its place, and somebody says which side counts.
#[test]
fn a_backup_takes_the_place_of_a_dead_disk() -> Result<()> {
    for (trust, want) in [("origin", 9), ("flash", 3)] {
        let (mut hearth, origin) = dirty(&[2])?;
        std::fs::remove_file(&origin)?;
        std::fs::write(&origin, vec![9; SIZE as usize])?;
        hearth.start()?;
        wait_state(&hearth, "d", "refused")?;
        hearth.ok(&["disk", "set", "d", "--trust", trust])?;
        wait_state(&hearth, "d", "attached")?;
        ensure!(hearth.connect("d")?.read(2 * 4096, 4096)? == [want; 4096]);
    }
    Ok(())
}

/// A blank device takes the place of the flash that is gone.
fn adopt(hearth: &Hearth, flash: &Path, state: &Path) -> Result<String> {
    let new = ["pool", "adopt-flash", "--flash", path(flash)];
    let more = ["--size", "160M", "--state-dir", path(state)];
    hearth.ok(&[new, more].concat())
}

/// The SSD is dying and can still be read: what is dirty is saved from it, then a new one takes its place.
#[test]
fn what_is_dirty_is_saved_from_the_old_flash_before_a_new_one_takes_its_place() -> Result<()> {
    let (mut hearth, origin) = dirty(&[1, 8])?;
    let (flash, old) = (hearth.flash().to_owned(), hearth.dir().join("old.img"));
    std::fs::rename(&flash, &old)?;
    hearth.start()?;
    wait_state(&hearth, "d", "refused")?;
    for said in [
        hearth.ok(&["disk", "show", "d"])?,
        hearth.ok(&["pool", "show"])?,
    ] {
        ensure!(said.contains("unknown"), "{said}");
    }
    let listed = hearth.said(&["disk", "list"])?;
    ensure!(!listed.contains("goes on from its origin"), "{listed}");
    let state = hearth.dir().join("state");
    hearth.ok(&[
        "rescue",
        path(&old),
        "--state-dir",
        path(&state),
        "--disk",
        "d",
        "--onto",
        path(&origin),
    ])?;
    hearth.stop()?;
    adopt(&hearth, &flash, &state)?;
    hearth.start()?;
    wait_state(&hearth, "d", "refused")?;
    hearth.ok(&["disk", "set", "d", "--trust", "origin"])?;
    wait_state(&hearth, "d", "attached")?;
    ensure!(hearth.connect("d")?.read(8 * 4096, 4096)? == [9; 4096]);
    // From now on the origin is newer than the old flash.
    hearth.stop()?;
    let refused = hearth.refused(&[
        "rescue",
        path(&old),
        "--state-dir",
        path(&state),
        "--disk",
        "d",
        "--onto",
        path(&origin),
    ])?;
    ensure!(refused.contains("--force"), "{refused}");
    Ok(())
}

/// Written to one leg of a mirror alone, what is saved would be answered by every other read, and by no other.
#[test]
fn what_is_saved_goes_to_every_leg_of_a_mirror() -> Result<()> {
    let mut hearth = Hearth::with_pool("160M")?;
    hearth.serve_args = ["--destage-rate", "4K"].map(str::to_owned).to_vec();
    hearth.start()?;
    let legs = [
        blank(&hearth, "a.raw", SIZE)?,
        blank(&hearth, "b.raw", SIZE)?,
    ];
    let [a, b] = [path(&legs[0]), path(&legs[1])];
    hearth.ok(&["disk", "add", "d", "--mirror", a, "--mirror", b])?;
    let again = hearth.refused(&["disk", "mirror", "d", "--add", b])?;
    ensure!(again.contains("is a leg of disk d already"), "{again}");
    let both_current = |hearth: &Hearth| {
        wait::until("both legs are current", LIMIT, || {
            let shown = hearth.ok(&["disk", "show", "d"]).ok()?;
            (shown.matches(": current").count() == 2).then_some(())
        })
    };
    both_current(&hearth)?;
    // A leg is shown as current a moment before the pool has it durably.
    hearth.stop()?;
    hearth.start()?;
    both_current(&hearth)?;
    let mut client = hearth.connect("d")?;
    for block in [1, 8] {
        client.write(block * 4096, &[block as u8 + 1; 4096])?;
        client.flush()?;
    }
    hearth.kill9()?;
    let (flash, old) = (hearth.flash().to_owned(), hearth.dir().join("old.img"));
    std::fs::rename(&flash, &old)?;
    let state = hearth.dir().join("state");
    let saved = |onto: &[&str]| {
        let onto = onto.iter().flat_map(|leg| ["--onto", leg]);
        let what = [
            "rescue",
            path(&old),
            "--disk",
            "d",
            "--state-dir",
            path(&state),
        ];
        what.into_iter()
            .chain(onto)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let words =
        |args: &[String]| hearth.refused(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let refused = words(&saved(&[a]))?;
    ensure!(refused.contains("would not be the same"), "{refused}");
    ensure!(
        std::fs::read(&legs[0])? == std::fs::read(&legs[1])?,
        "nothing was written"
    );
    let both = saved(&[a, b]);
    hearth.ok(&both.iter().map(String::as_str).collect::<Vec<_>>())?;
    let [one, other] = [std::fs::read(&legs[0])?, std::fs::read(&legs[1])?];
    ensure!(one == other && one[8 * 4096] == 9 && one[4096] == 2);
    adopt(&hearth, &flash, &state)?;
    hearth.start()?;
    hearth.ok(&["disk", "set", "d", "--trust", "origin"])?;
    wait_state(&hearth, "d", "attached")?;
    // Either leg answers.
    let mut client = hearth.connect("d")?;
    for _ in 0..8 {
        ensure!(client.read(8 * 4096, 4096)? == [9; 4096]);
    }
    Ok(())
}
