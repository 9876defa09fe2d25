//! What is changed of a disk while its origin gets what it has: legs, another mode, another size.

use super::*;

/// Moves a disk to an origin that takes long, so that it has not moved when that is answered.
fn begun(hearth: &Hearth, name: &str, round: u8) -> Result<(std::path::PathBuf, Vec<u8>)> {
    let content = holding(hearth, name, round)?;
    let file = hearth.dir().join(format!("{name}.raw"));
    let origin = slow(&file);
    hearth.ok(&["disk", "move", name, "--origin", &origin])?;
    is_moving(hearth, name)?;
    Ok((file, content))
}

fn slow(file: &std::path::Path) -> String {
    format!("model-latency=500ms:{}", path(file))
}

fn is_moving(hearth: &Hearth, name: &str) -> Result<()> {
    let now = shown(hearth, name)?;
    ensure!(now["home"] == "moving", "it has moved already: {now}");
    Ok(())
}

fn legs_are(hearth: &Hearth, name: &str, wanted: &[&str]) -> Result<Value> {
    until("the legs are the same", LIMIT, || {
        let now = shown(hearth, name).ok()?;
        let legs = now["legs"].as_array()?;
        let states = legs.iter().map(|leg| leg["state"].as_str());
        states
            .eq(wanted.iter().map(|state| Some(*state)))
            .then_some(now)
    })
}

#[test]
fn a_disk_that_moves_to_an_origin_becomes_a_mirror_of_it() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    let (one, mut content) = begun(&hearth, "d", 1)?;
    let files = ["two", "three"].map(|name| hearth.dir().join(name));
    for file in &files {
        std::fs::File::create(file)?.set_len(MOVED)?;
    }
    let [two, three] = &files;
    let mut client = hearth.connect("d")?;
    hearth.ok(&["disk", "mirror", "d", "--add", path(two)])?;
    is_moving(&hearth, "d")?;
    client.write(21 << 20, &bytes(98))?;
    client.flush()?;
    content[21 * MIB..22 * MIB].fill(98);
    drop(client);
    hearth.kill9()?;
    hearth.start()?;
    holds(&hearth, "d", &content)?;
    ensure!(shown(&hearth, "d")?["legs"].as_array().map(Vec::len) == Some(2));
    legs_are(&hearth, "d", &["current", "current"])?;
    // Another takes the place of the one that it moved to.
    hearth.ok(&["disk", "replace", "d", &slow(&one), path(three)])?;
    hearth.ok(&["disk", "flush", "d"])?;
    until("it has moved", LIMIT, || {
        (shown(&hearth, "d").ok()?["home"] == "origin").then_some(())
    })?;
    legs_are(&hearth, "d", &["current", "current"])?;
    holds(&hearth, "d", &content)?;
    hearth.stop()?;
    for file in &files {
        ensure!(std::fs::read(file)? == content, "{}", file.display());
    }
    Ok(())
}

#[test]
fn a_disk_that_moves_to_an_origin_may_be_served_in_any_mode_meanwhile() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    for (round, mode) in [
        (1u8, "write-through"),
        (2, "write-back-ordered"),
        (3, "off"),
    ] {
        let name = format!("d{round}");
        let (file, mut content) = begun(&hearth, &name, round)?;
        let mut client = hearth.connect(&name)?;
        hearth.ok(&["disk", "set", &name, "--mode", mode])?;
        is_moving(&hearth, &name)?;
        client.write(2 << 20, &bytes(97))?;
        client.write(22 << 20, &bytes(96))?;
        client.flush()?;
        content[2 * MIB..3 * MIB].fill(97);
        content[22 * MIB..23 * MIB].fill(96);
        drop(client);
        hearth.kill9()?;
        hearth.start()?;
        holds(&hearth, &name, &content)?;
        moved(&hearth, &name, &file, &content)?;
        hearth.ok(&["disk", "remove", &name, "--yes"])?;
    }
    Ok(())
}

#[test]
fn a_disk_that_moves_to_an_origin_grows_as_far_as_flash_can_be_promised() -> Result<()> {
    let mut hearth = Hearth::serving("128M")?;
    let (file, mut content) = begun(&hearth, "d", 1)?;
    let grown = std::fs::OpenOptions::new().write(true).open(&file)?;
    let larger = ["disk", "set", "d", "--size-from-origin"];
    // The bytes that nobody has asked for yet.
    grown.set_len(MOVED + (4 << 20))?;
    hearth.ok(&larger)?;
    is_moving(&hearth, "d")?;
    content.resize(content.len() + 4 * MIB, 0);
    let mut client = hearth.connect("d")?;
    client.write(25 << 20, &bytes(95))?;
    client.flush()?;
    content[25 * MIB..26 * MIB].fill(95);
    drop(client);
    hearth.kill9()?;
    hearth.start()?;
    // More than can be promised. No start comes while the file is so large: it would find another one.
    is_moving(&hearth, "d")?;
    grown.set_len(256 << 20)?;
    let said = hearth.refused(&larger)?;
    ensure!(said.contains("cannot be promised to d"), "{said}");
    ensure!(hearth.connect("d")?.size == MOVED + (4 << 20));
    grown.set_len(MOVED + (4 << 20))?;
    holds(&hearth, "d", &content)?;
    moved(&hearth, "d", &file, &content)
}

#[test]
fn a_disk_on_its_way_onto_flash_gets_no_leg() -> Result<()> {
    let hearth = Hearth::serving("128M")?;
    let (file, content) = partly_written(&hearth, "d.raw", 3)?;
    hearth.add("d", &slow(&file), &[])?;
    hearth.ok(&["disk", "move", "d", "--flash-only"])?;
    let now = shown(&hearth, "d")?;
    ensure!(now["onto_flash"].is_object(), "it is there already: {now}");
    let leg = hearth.dir().join("leg");
    std::fs::File::create(&leg)?.set_len(MOVED)?;
    let said = hearth.refused(&["disk", "mirror", "d", "--add", path(&leg)])?;
    ensure!(
        said.contains("on its way onto flash") && said.contains("hearth disk flush d"),
        "{said}"
    );
    lives_on_flash(&hearth, "d")?;
    let said = hearth.refused(&["disk", "mirror", "d", "--add", path(&leg)])?;
    ensure!(said.contains("lives on flash"), "{said}");
    let said = hearth.refused(&["disk", "replace", "d", path(&file), path(&leg)])?;
    ensure!(said.contains("is no leg of d"), "{said}");
    holds(&hearth, "d", &content)?;
    ensure!(std::fs::read(&leg)? == vec![0; MOVED as usize]);
    Ok(())
}
