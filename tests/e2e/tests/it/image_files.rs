//! What an image may make Hearth open: nothing but itself, unless its owner has allowed it.

use anyhow::{Context, Result, ensure};
use hearth_rig::child::bound_to_us;
use hearth_rig::clients::{have, run_ok};
use hearth_rig::daemon::path;
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a state that comes by itself.
const LIMIT: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;
const TOOLS: [&str; 2] = ["qemu-img", "qemu-storage-daemon"];

fn img(hearth: &Hearth, args: &[&str]) -> Result<()> {
    run_ok("qemu-img", args, hearth.dir()).map(drop)
}

fn show(hearth: &Hearth, disk: &str) -> Result<Value> {
    Ok(serde_json::from_str(
        &hearth.ok(&["disk", "show", disk, "--json"])?,
    )?)
}

fn until_attached(hearth: &Hearth, disk: &str) -> Result<()> {
    wait::until("attached", LIMIT, || {
        (show(hearth, disk).ok()?["state"] == "attached").then_some(())
    })
    .with_context(|| hearth.log())
}

fn add(hearth: &Hearth, disk: &str, origin: &str, more: &[&str]) -> Result<()> {
    let args = [&["disk", "add", disk, "--origin", origin], more].concat();
    hearth.ok(&args).map(drop)
}

fn refused(hearth: &Hearth, origin: &str, more: &[&str]) -> Result<String> {
    let args = [&["disk", "add", "d", "--origin", origin], more].concat();
    hearth.refused(&args)
}

/// An overlay over `base`, as qemu-img makes it.
fn overlay(hearth: &Hearth, name: &str, base: &str) -> Result<PathBuf> {
    let top = hearth.dir().join(name);
    let made = ["create", "-u", "-f", "qcow2", "-F", "raw", "-b", base];
    img(hearth, &[&made[..], &[path(&top), "4M"]].concat())?;
    Ok(top)
}

/// Has an overlay name another base, without a look at either.
fn rebase(hearth: &Hearth, top: &Path, base: &str) -> Result<()> {
    let how = ["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", base];
    img(hearth, &[&how[..], &[path(top)]].concat())
}

/// A fixed VHD looks raw. Its advice is followed, and a copy that `qemu-img convert` made of it, taking it for raw, is served.
#[test]
fn fixed_vhd_is_served_as_advised() -> Result<()> {
    if !have("image files: fixed VHD", &TOOLS) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let (vhd, copy) = (hearth.dir().join("f.vhd"), hearth.dir().join("f.raw"));
    let options = "subformat=fixed,force_size=on";
    img(
        &hearth,
        &["create", "-f", "vpc", "-o", options, path(&vhd), "8M"],
    )?;
    let advised = format!("vhd:{}", path(&vhd));
    let words = refused(&hearth, path(&vhd), &[])?;
    ensure!(words.contains(&advised), "{words}");
    add(&hearth, "fixed", &advised, &[])?;
    ensure!(show(&hearth, "fixed")?["size"] == 8 * MIB);
    let mut client = hearth.connect("fixed")?;
    client.write(4096, &[7; 4096])?;
    client.flush()?;
    drop(client);
    hearth.ok(&["disk", "remove", "fixed"])?;
    let whole = std::fs::read(&vhd)?;
    ensure!(whole[4096..8192] == [7; 4096] && whole[8 * MIB..].starts_with(b"conectix"));
    img(&hearth, &["convert", "-O", "raw", path(&vhd), path(&copy)])?;
    add(&hearth, "copy", path(&copy), &[])?;
    ensure!(hearth.connect("copy")?.read(4096, 4096)? == [7; 4096]);
    Ok(())
}

/// VMware splits 1 TiB into 259 pieces, with names in the encoding of its host.
#[test]
fn vmdk_of_many_pieces_is_served_again() -> Result<()> {
    const PIECES: usize = 300;
    if !have("image files: pieces", &TOOLS) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let mut text = b"# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
        createType=\"twoGbMaxExtentFlat\"\nencoding=\"GBK\"\n\n# Extent description\n"
        .to_vec();
    for n in 1..=PIECES {
        let mut name = if n == 7 {
            b"\xd0\xe9\xc4\xe2".to_vec()
        } else {
            b"d".to_vec()
        };
        name.extend(format!("-f{n:03}.vmdk").into_bytes());
        let file = hearth.dir().join(std::ffi::OsStr::from_bytes(&name));
        std::fs::File::create(file)?.set_len(MIB as u64)?;
        text.extend([b"RW 2048 FLAT \"", &name[..], b"\" 0\n"].concat());
    }
    text.extend(b"\nddb.virtualHWVersion = \"4\"\nddb.adapterType = \"lsilogic\"\n");
    let top = hearth.dir().join("d.vmdk");
    std::fs::write(&top, text)?;
    add(
        &hearth,
        "d",
        &format!("vmdk:{}", path(&top)),
        &["--allow-backing"],
    )?;
    ensure!(show(&hearth, "d")?["size"] == PIECES * MIB);
    let mut client = hearth.connect("d")?;
    // Into the piece whose name is not text, and into the last.
    for piece in [6, PIECES - 1] {
        client.write((piece * MIB) as u64, &[piece as u8; 4096])?;
    }
    client.flush()?;
    drop(client);
    hearth.stop()?;
    hearth.start()?;
    until_attached(&hearth, "d")?;
    for piece in [6, PIECES - 1] {
        let read = hearth.connect("d")?.read((piece * MIB) as u64, 4096)?;
        ensure!(read == [piece as u8; 4096], "piece {piece}");
    }
    Ok(())
}

/// A path is written as the file is called; the form of addresses works where no file is called that.
#[test]
fn path_may_be_written_as_in_address() -> Result<()> {
    let hearth = Hearth::serving("160M")?;
    let origin = |name: &str| hearth.origin(name, MIB as u64);
    origin("100%.raw")?;
    origin("no#1.raw")?;
    origin("a%23b.raw")?;
    origin("a#b.raw")?;
    for (disk, typed, called) in [
        ("p", "100%25.raw", "100%.raw"),
        ("n", "no%231.raw", "no#1.raw"),
        ("both", "a%23b.raw", "a%23b.raw"),
    ] {
        add(&hearth, disk, path(&hearth.dir().join(typed)), &[])?;
        let shown = show(&hearth, disk)?["origin"].to_string();
        ensure!(shown.contains(&format!("/{called}\"")), "{disk}: {shown}");
    }
    Ok(())
}

/// Named without its format an image is refused, with both ways to mean it; a guest that writes
/// such a header into its own disk is not locked out by it.
#[test]
fn an_image_without_its_format_is_a_question() -> Result<()> {
    if !have("image files: formats", &TOOLS) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    for format in ["qcow2", "vmdk", "vdi", "vhdx", "vpc"] {
        let image = hearth.dir().join(format!("i.{format}"));
        img(&hearth, &["create", "-f", format, path(&image), "8M"])?;
        let words = refused(&hearth, path(&image), &[])?;
        let form = if format == "vpc" { "vhd" } else { format };
        for way in [
            format!("{form}:{}", path(&image)),
            format!("file:{}", path(&image)),
        ] {
            ensure!(words.contains(&way), "{format}: {words}");
        }
    }
    let image = hearth.dir().join("i.qcow2");
    add(&hearth, "bytes", &format!("file:{}", path(&image)), &[])?;
    let whole = std::fs::read(&image)?;
    let head = hearth.connect("bytes")?.read(0, 4096)?;
    ensure!(head == whole[..4096], "not the file's own bytes");
    ensure!(show(&hearth, "bytes")?["size"] == whole.len());
    hearth.ok(&["disk", "remove", "bytes"])?;
    add(&hearth, "image", &format!("qcow2:{}", path(&image)), &[])?;
    ensure!(show(&hearth, "image")?["size"] == 8 * MIB);

    let plain = hearth.origin("plain.raw", MIB as u64)?;
    add(&hearth, "plain", path(&plain), &[])?;
    let mut client = hearth.connect("plain")?;
    client.write(0, &head)?;
    client.flush()?;
    drop(client);
    hearth.ok(&["disk", "flush", "plain"])?;
    hearth.stop()?;
    ensure!(std::fs::read(&plain)?[..4] == *b"QFI\xfb");
    hearth.start()?;
    until_attached(&hearth, "plain")?;
    ensure!(hearth.connect("plain")?.read(0, 4096)? == head);
    Ok(())
}

/// Who writes a base changes what lies on it. QEMU, which only reads it for us, would not mind.
#[test]
fn a_base_is_written_by_nobody() -> Result<()> {
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    if !have("image files: a base is held", &TOOLS)
        || !have("image files: a base is held", &["qemu-io"])
    {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let base = hearth.origin("base.raw", 4 * MIB as u64)?;
    let top = overlay(&hearth, "top.qcow2", path(&base))?;
    let origin = format!("qcow2:{}", path(&top));
    let mut command = Command::new("qemu-io");
    command
        .args(["-f", "raw", path(&base)])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut writer = bound_to_us(&mut command).spawn()?;
    let mut says = writer.stdin.take().context("no pipe")?;
    says.write_all(b"write -P 3 1M 4k\nflush\n")?;
    wait::until("it writes the base", LIMIT, || {
        (std::fs::read(&base).ok()?[MIB] == 3).then_some(())
    })?;
    let words = refused(&hearth, &origin, &["--allow-backing"])?;
    ensure!(
        words.contains("base.raw") && words.contains("in use by qemu-io"),
        "{words}"
    );
    // It ends when nothing more is said.
    drop(says);
    writer.wait()?;
    add(&hearth, "d", &origin, &["--allow-backing"])?;
    let write = ["-f", "raw", "-c", "write 0 4k", path(&base)];
    let read = ["-r", "-f", "raw", "-c", "read 0 4k", path(&base)];
    for _ in 0..2 {
        ensure!(run_ok("qemu-io", &write, hearth.dir()).is_err());
        run_ok("qemu-io", &read, hearth.dir())?;
        hearth.stop()?;
        hearth.start()?;
        until_attached(&hearth, "d")?;
    }
    ensure!(hearth.connect("d")?.read(MIB as u64, 4096)? == [3; 4096]);
    hearth.ok(&["disk", "remove", "d"])?;
    run_ok("qemu-io", &write, hearth.dir())?;
    Ok(())
}

/// A daemon is started with what its starter has open: a lock (`flock FILE hearth serve`), a file that
/// systemd opened. That is no file of an image.
#[test]
fn what_the_daemon_inherited_is_not_handed_on() -> Result<()> {
    if !have("image files: inherited", &TOOLS) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    hearth.stop()?;
    let held = hearth.dir().join("a lock");
    let script = format!("exec \"$0\" \"$@\" 9>>'{}'", path(&held));
    hearth.wrap = ["sh", "-c", &script].map(str::to_owned).to_vec();
    hearth.start()?;
    let image = hearth.dir().join("i.qcow2");
    img(&hearth, &["create", "-f", "qcow2", path(&image), "8M"])?;
    add(&hearth, "d", &format!("qcow2:{}", path(&image)), &[])?;
    ensure!(hearth.connect("d")?.read(0, 4096)? == [0; 4096]);
    Ok(())
}

/// Backing files, descriptions in JSON, data files and VMDK extents: none is opened unasked.
#[test]
fn what_an_image_names_is_not_followed_unasked() -> Result<()> {
    if !have("image files: not followed", &TOOLS) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let elsewhere = tempfile::tempdir()?;
    let secret = elsewhere.path().join("secret.raw");
    std::fs::write(&secret, vec![7; 4 * MIB])?;
    let beside = hearth.dir().join("link.raw");
    std::os::unix::fs::symlink(&secret, &beside)?;
    let data = hearth.dir().join("data.qcow2");
    let option = format!("data_file={},data_file_raw=on", path(&secret));
    img(
        &hearth,
        &["create", "-f", "qcow2", "-o", &option, path(&data), "4M"],
    )?;
    std::fs::write(&secret, vec![7; 4 * MIB])?;
    let vmdk = hearth.dir().join("pieces.vmdk");
    let descriptor = format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
         createType=\"monolithicFlat\"\nRW 8192 FLAT \"{}\" 0\n\
         ddb.adapterType = \"ide\"\n",
        path(&secret)
    );
    std::fs::write(&vmdk, descriptor)?;
    let json = format!(
        "json:{{\"driver\":\"raw\",\"file\":{{\"driver\":\"file\",\"filename\":\"{}\"}}}}",
        path(&secret)
    );
    let images = [
        (overlay(&hearth, "plain.qcow2", path(&secret))?, "outside"),
        (overlay(&hearth, "symlink.qcow2", "link.raw")?, "outside"),
        (overlay(&hearth, "json.qcow2", &json)?, "no plain path"),
        (
            overlay(&hearth, "nbd.qcow2", "nbd://127.0.0.1:1/x")?,
            "no plain path",
        ),
        (data.clone(), "outside"),
        (vmdk.clone(), "outside"),
    ];
    for (image, why) in &images {
        let format = image
            .extension()
            .and_then(|e| e.to_str())
            .context("a format")?;
        let origin = format!("{format}:{}", path(image));
        let words = refused(&hearth, &origin, &[])?;
        ensure!(words.contains("--allow-backing"), "{origin}: {words}");
        // Nor asked, unless it lies where such files may lie.
        let words = refused(&hearth, &origin, &["--allow-backing"])?;
        ensure!(words.contains(why), "{origin}: {words}");
    }
    ensure!(
        std::fs::read(&secret)? == vec![7; 4 * MIB],
        "it was written"
    );

    let mut hearth = hearth;
    hearth.stop()?;
    hearth.serve_args = vec![
        "--backing-dir".to_owned(),
        path(elsewhere.path()).to_owned(),
    ];
    hearth.start()?;
    for (name, image) in [("a", &images[0].0), ("b", &data), ("c", &vmdk)] {
        let format = image
            .extension()
            .and_then(|e| e.to_str())
            .context("a format")?;
        add(
            &hearth,
            name,
            &format!("{format}:{}", path(image)),
            &["--allow-backing"],
        )
        .with_context(|| hearth.log())?;
        ensure!(hearth.connect(name)?.read(0, 4096)? == [7; 4096], "{name}");
        ensure!(hearth.ok(&["disk", "show", name])?.contains(path(&secret)));
        hearth.ok(&["disk", "remove", name])?;
    }
    Ok(())
}

/// The files below an image are part of what the disk is: shown, and noticed when they are others.
#[test]
fn a_chain_is_shown_and_must_stay() -> Result<()> {
    if !have("image files: chain", &TOOLS) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let base = hearth.origin("base.raw", 4 * MIB as u64)?;
    let other = hearth.dir().join("other.raw");
    std::fs::write(&other, vec![9; 4 * MIB])?;
    let middle = overlay(&hearth, "middle.qcow2", "base.raw")?;
    let top = hearth.dir().join("top.qcow2");
    let made = ["create", "-f", "qcow2", "-F", "qcow2", "-b", "middle.qcow2"];
    img(&hearth, &[&made[..], &[path(&top)]].concat())?;
    add(
        &hearth,
        "d",
        &format!("qcow2:{}", path(&top)),
        &["--allow-backing"],
    )?;
    let chain = |hearth: &Hearth| -> Result<Vec<String>> {
        Ok(serde_json::from_value(show(hearth, "d")?["chain"].clone())?)
    };
    let lines = [
        format!("qcow2:{}", path(&middle)),
        format!("raw:{}", path(&base)),
    ];
    ensure!(chain(&hearth)? == lines);
    for line in &lines {
        ensure!(hearth.ok(&["disk", "show", "d"])?.contains(line));
    }
    let before = std::fs::read(&base)?;
    ensure!(hearth.connect("d")?.read(0, 65536)? == before[..65536]);
    hearth.stop()?;
    rebase(&hearth, &middle, "other.raw")?;
    hearth.start()?;
    let info = show(&hearth, "d")?;
    ensure!(info["state"] == "refused", "{info}");
    let (reason, remedy) = (&info["reason"], &info["remedy"]);
    let reason = reason.as_str().unwrap_or_default();
    ensure!(
        reason.contains("base.raw")
            && reason.contains("other.raw")
            && remedy
                .as_str()
                .is_some_and(|r| r.contains("--allow-backing")),
        "{info}"
    );
    rebase(&hearth, &middle, "base.raw")?;
    until_attached(&hearth, "d")?;
    hearth.stop()?;
    rebase(&hearth, &middle, "other.raw")?;
    hearth.start()?;
    hearth.ok(&["disk", "set", "d", "--allow-backing"])?;
    until_attached(&hearth, "d")?;
    ensure!(chain(&hearth)?[1] == format!("raw:{}", path(&other)));
    Ok(())
}

/// The image's own file hardly changes when its data lies in another.
#[test]
fn a_change_to_a_data_file_is_noticed() -> Result<()> {
    if !have("image files: data file", &TOOLS) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("160M")?;
    let (top, data) = (hearth.dir().join("top.qcow2"), hearth.dir().join("data"));
    let option = format!("data_file={},data_file_raw=on", path(&data));
    img(
        &hearth,
        &["create", "-f", "qcow2", "-o", &option, path(&top), "4M"],
    )?;
    let origin = format!("qcow2:{}", path(&top));
    add(&hearth, "d", &origin, &["--allow-backing"])?;
    hearth.connect("d")?.write(0, &[5; 4096])?;
    hearth.ok(&["disk", "flush", "d"])?;
    let restarted = |hearth: &mut Hearth| -> Result<String> {
        hearth.start()?;
        until_attached(hearth, "d")?;
        Ok(show(hearth, "d")?["notices"].to_string())
    };
    hearth.stop()?;
    let notices = restarted(&mut hearth)?;
    ensure!(!notices.contains("changed"), "{notices}");
    hearth.stop()?;
    // Where nothing is cached, so that the content shows nothing.
    let file = std::fs::File::options().write(true).open(&data)?;
    std::os::unix::fs::FileExt::write_all_at(&file, &[6; 4096], 2 << 20)?;
    drop(file);
    let notices = restarted(&mut hearth)?;
    ensure!(notices.contains("written by somebody else"), "{notices}");
    let mut client = hearth.connect("d")?;
    ensure!(client.read(0, 4096)? == [5; 4096] && client.read(2 << 20, 4096)? == [6; 4096]);
    Ok(())
}

/// A base may lie under many overlays, but nobody writes it meanwhile.
#[test]
fn a_base_is_nobody_elses_disk() -> Result<()> {
    if !have("image files: base in use", &TOOLS) {
        return Ok(());
    }
    let hearth = Hearth::serving("160M")?;
    let base = hearth.origin("base.raw", 4 * MIB as u64)?;
    let hard = hearth.dir().join("hard-link.raw");
    std::fs::hard_link(&base, &hard)?;
    let one = overlay(&hearth, "one.qcow2", path(&base))?;
    let two = overlay(&hearth, "two.qcow2", path(&hard))?;
    let origin = |top: &Path| format!("qcow2:{}", path(top));
    add(&hearth, "live", path(&base), &[])?;
    for top in [&one, &two] {
        let words = refused(&hearth, &origin(top), &["--allow-backing"])?;
        ensure!(words.contains("origin of disk live"), "{words}");
    }
    hearth.ok(&["disk", "remove", "live"])?;
    add(&hearth, "one", &origin(&one), &["--allow-backing"])?;
    add(&hearth, "two", &origin(&two), &["--allow-backing"])?;
    for path_of in [&base, &hard] {
        let words = refused(&hearth, path(path_of), &[])?;
        ensure!(words.contains("below the image of disk"), "{words}");
    }
    let words = refused(&hearth, &origin(&one), &["--allow-backing"])?;
    ensure!(words.contains("already the origin"), "{words}");
    Ok(())
}
