"""A small ray caster: what the cameras of a rig see of a road scene, and which pixels show ground to drive on.

A scene is decided by its random generator alone: a road that bends, perhaps a crossing, pavements, boxes that are
cars on the road or buildings and trees beside it, light and colours. A pixel is drivable where its ray meets the
road before it meets a box; that is known exactly, without a line drawn by hand.

Metres; x ahead, y to the left, z up, in the frame of the rig at the last moment.
Legend of shape suffixes: R rays of an image, K boxes, 2 or 3 coordinates or colours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CAMERA_HEIGHT_M = 1.6
FIELD_OF_VIEW = np.radians(68.0)
VIEW_SPACING = np.radians(60.0)  # six cameras see all around
MAX_VIEWS = 6
SECONDS_A_MOMENT = 0.5
FARTHEST_M = 90.0  # what lies beyond is haze, and not drivable
PAVEMENT_M = 1.8


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A place and what moves through it; colours are in [0, 1]."""

    bend: float  # of the road's middle line y = bend/2 x², in 1/m
    half_width: float  # of the road
    crossing: (
        tuple[float, float, int] | None
    )  # where its middle is, half its width; its side: -1 right, 1 left, 0 both
    lateral: float  # of the rig, from the road's middle
    speed: float
    heading: float  # of the rig, from the road's own
    pitch: float
    road_3: np.ndarray
    pavement_3: np.ndarray
    verge_3: np.ndarray
    sky_3: np.ndarray
    light: float
    shadows: float  # phase of the shadows across the road
    # Upright boxes, one or more: cars, walls, trees.
    center_K2: np.ndarray  # where they stand at the last moment
    half_K3: np.ndarray  # half their length, half their width, their height
    yaw_K: np.ndarray  # where they head
    speed_K: np.ndarray  # metres a second, that way
    colour_K3: np.ndarray


def draw_scene(generator: np.random.Generator) -> Scene:
    """A scene at random."""
    uniform, integers = generator.uniform, generator.integers
    half_width = uniform(2.0, 6.5)
    grey = uniform(0.22, 0.5)
    verges = np.array([[0.25, 0.4, 0.18], [0.45, 0.38, 0.25], [0.5, 0.48, 0.42], [0.3, 0.33, 0.3]])
    skies = np.array([[0.55, 0.7, 0.9], [0.75, 0.77, 0.8], [0.85, 0.65, 0.5]])
    crossing = None
    if uniform() < 0.5:
        crossing = (uniform(8, 35), uniform(2.5, 5.0), int(integers(-1, 2)))
    place = {
        "bend": (bend := uniform(-0.03, 0.03)),
        "half_width": half_width,
        "crossing": crossing,
        "lateral": uniform(-0.7, 0.7) * (half_width - 1.0),
        "speed": uniform(0, 14),
        "heading": np.radians(uniform(-25, 25)),
        "pitch": np.radians(uniform(2, 14)),
        "road_3": grey + uniform(-0.02, 0.02, 3),
        # Pavements are of the road's grey, or nearly: colour alone does not tell them apart.
        "pavement_3": np.clip(grey + uniform(-0.06, 0.2) + uniform(-0.02, 0.02, 3), 0, 1),
        "verge_3": np.clip(verges[integers(len(verges))] + uniform(-0.06, 0.06, 3), 0, 1),
        "sky_3": skies[integers(len(skies))],
        "light": uniform(0.6, 1.15),
        "shadows": uniform(0, 40),
    }
    cars, others = int(integers(0, 7)), int(integers(3, 8))
    along_K = np.concatenate([uniform(3.5, 35, cars), uniform(-8, 55, others)])
    on_road = uniform(-0.85, 0.85, cars) * half_width
    beside = generator.choice([-1, 1], others) * (half_width + PAVEMENT_M + uniform(1.5, 9, others))
    car_half = np.stack([uniform(1.8, 2.6, cars), uniform(0.8, 1.1, cars), uniform(1.3, 2.6, cars)], 1)
    other_half = np.stack([uniform(0.3, 5, others), uniform(0.3, 1.5, others), uniform(2, 8, others)], 1)
    car_speed = uniform(0, 12, cars) * generator.choice([-1, 0, 1], cars)
    return Scene(
        **place,
        center_K2=np.stack([along_K, 0.5 * bend * along_K**2 + np.concatenate([on_road, beside])], axis=1),
        half_K3=np.concatenate([car_half, other_half]),
        yaw_K=np.arctan(bend * along_K),
        speed_K=np.concatenate([car_speed, np.zeros(others)]),
        colour_K3=uniform(0.05, 0.9, (cars + others, 3)),
    )


def render(
    scene: Scene, *, img_size: int, view: int, num_views: int, moments_ago: int
) -> tuple[np.ndarray, np.ndarray]:
    """What one camera sees at one moment.

    Args:
        scene: What there is.
        img_size: Height and width, in pixels.
        view: Camera, 0 .. num_views - 1, from the left to the right.
        num_views: Cameras of the rig, 1 to 6; the middle one looks ahead.
        moments_ago: 0 is the last moment.

    Returns:
        The image, float64 in [0, 1] of shape (H, W, 3), without the camera's noise; and the mask, bool (H, W).
    """
    past_s = moments_ago * SECONDS_A_MOMENT
    x = -scene.speed * past_s
    yaw = np.arctan(scene.bend * x) + scene.heading + ((num_views - 1) / 2 - view) * VIEW_SPACING
    eye_3 = np.array([x, 0.5 * scene.bend * x**2 + scene.lateral, CAMERA_HEIGHT_M])
    rays_R3 = _rays(img_size, yaw, scene.pitch)
    with np.errstate(divide="ignore"):
        ground_R = np.where(rays_R3[:, 2] < 0, -CAMERA_HEIGHT_M / rays_R3[:, 2], np.inf)
    box_R, nearest_R, face_R = _meet_boxes(scene, eye_3, rays_R3, past_s)
    is_box_R = (box_R < ground_R) & (box_R < FARTHEST_M)
    is_ground_R = ~is_box_R & (ground_R < FARTHEST_M)
    points_R2 = eye_3[:2] + rays_R3[:, :2] * np.where(is_ground_R, ground_R, 0.0)[:, None]
    colours_R3, drivable_R = _ground(scene, points_R2, np.where(is_ground_R, ground_R, 0.0))
    colours_R3 = np.where(is_ground_R[:, None], colours_R3, scene.sky_3 * (1 - 0.3 * rays_R3[:, 2:]))
    colours_R3 = np.where(is_box_R[:, None], scene.colour_K3[nearest_R] * face_R[:, None], colours_R3)
    distance_R = np.where(is_box_R, box_R, np.where(is_ground_R, ground_R, FARTHEST_M))
    haze_R1 = 0.6 * (1 - np.exp(-distance_R / 70))[:, None]
    colours_R3 = np.clip(scene.light * (colours_R3 * (1 - haze_R1) + scene.sky_3 * haze_R1), 0, 1)
    shape = (img_size, img_size)
    return colours_R3.reshape(*shape, 3), (is_ground_R & drivable_R).reshape(shape)


def _rays(img_size: int, yaw: float, pitch: float) -> np.ndarray:
    """rays_R3: unit vectors through the middles of the pixels, row by row from the top left."""
    steps = (np.arange(img_size) + 0.5) / img_size * 2 - 1
    right, down = np.meshgrid(steps * np.tan(FIELD_OF_VIEW / 2), steps * np.tan(FIELD_OF_VIEW / 2))
    ahead = np.cos(pitch) - down * np.sin(pitch)
    up = -np.sin(pitch) - down * np.cos(pitch)
    x = ahead * np.cos(yaw) + right * np.sin(yaw)
    y = ahead * np.sin(yaw) - right * np.cos(yaw)
    rays = np.stack([x, y, up], axis=-1).reshape(-1, 3)
    return rays / np.linalg.norm(rays, axis=1, keepdims=True)


def _ground(scene: Scene, points_R2: np.ndarray, distance_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Colour of the ground at each point, and whether it is road."""
    x, y = points_R2.T
    across = y - 0.5 * scene.bend * x**2
    road = np.abs(across) < scene.half_width
    pavement = np.abs(across) < scene.half_width + PAVEMENT_M
    if scene.crossing is not None:
        at, half, side = scene.crossing
        this_side = np.sign(across) * side >= 0
        road = road | ((np.abs(x - at) < half) & this_side)
        pavement = pavement | ((np.abs(x - at) < half + PAVEMENT_M) & this_side)
    colours = np.where(pavement[:, None], scene.pavement_3, scene.verge_3)
    colours = np.where(road[:, None], scene.road_3, colours)
    own_road = np.abs(across) < scene.half_width
    dashes = (np.abs(across) < 0.09) & (np.mod(x, 6.0) < 3.0)
    edges = np.abs(np.abs(across) - scene.half_width + 0.35) < 0.07
    lines = own_road & (dashes | edges) & (scene.road_3[0] > 0.3)
    colours = np.where(lines[:, None], 0.85, colours)
    shadow = np.sin(0.35 * x + 0.2 * y + scene.shadows) > 0.75
    grain = 1 + 0.25 * (_noise(np.floor(x * 4), np.floor(y * 4)) - 0.5) * np.exp(-distance_R / 15)
    return colours * (grain * np.where(shadow, 0.6, 1.0))[:, None], road


def _noise(column: np.ndarray, row: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each pair of whole numbers."""
    mixed = column.astype(np.int64) * 374761393 + row.astype(np.int64) * 668265263
    mixed = (mixed ^ (mixed >> 13)) * 1274126177
    return ((mixed ^ (mixed >> 16)) & 0xFFFF) / 65536.0


def _meet_boxes(
    scene: Scene, eye_3: np.ndarray, rays_R3: np.ndarray, past_s: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How far each ray goes until it meets a box (inf: never), which one, and how bright its face is."""
    cos_K, sin_K = np.cos(scene.yaw_K), np.sin(scene.yaw_K)
    travelled_K2 = past_s * scene.speed_K[:, None] * np.stack([cos_K, sin_K], 1)
    off_K2 = eye_3[:2] - scene.center_K2 + travelled_K2

    def turned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.stack([x * cos_K + y * sin_K, y * cos_K - x * sin_K], axis=-1)

    start_K3 = np.concatenate([turned(off_K2[:, 0], off_K2[:, 1]), np.full((len(cos_K), 1), eye_3[2])], 1)
    planar_RK2 = turned(rays_R3[:, :1], rays_R3[:, 1:2])
    upward_RK1 = np.broadcast_to(rays_R3[:, 2, None, None], (*planar_RK2.shape[:2], 1))
    rays_RK3 = np.concatenate([planar_RK2, upward_RK1], axis=-1)
    rays_RK3 = np.where(np.abs(rays_RK3) < 1e-9, 1e-9, rays_RK3)
    low_K3 = scene.half_K3 * [-1, -1, 0]
    one, other = (low_K3 - start_K3) / rays_RK3, (scene.half_K3 - start_K3) / rays_RK3
    enter_RK3, leave_RK = np.minimum(one, other), np.maximum(one, other).min(-1)
    enter_RK = enter_RK3.max(-1)
    hits_RK = np.where((enter_RK < leave_RK) & (enter_RK > 0), enter_RK, np.inf)
    nearest_R = hits_RK.argmin(1)
    rows = np.arange(len(rays_R3))
    faces = np.array([0.75, 1.0, 1.15])[enter_RK3[rows, nearest_R].argmax(-1)]
    return hits_RK[rows, nearest_R], nearest_R, faces
